"""Inputs of both systems of a benchmark: a model with random weights, prompts, and the length of each completion.

Lengths are prescribed, so that both systems do the same work: completion j of a run (in the order of prompts, siblings
adjacent) has ``lengths(...)[j]`` tokens in both. An earlier end-of-sequence token does not end a completion; the last
token always does. The functions ``prescribe_*`` patch the code of each sampler that decides on the end.

The workload ``real`` prescribes nothing: a given model answers the questions of GSM8K until it ends or reaches the cap.
"""

from __future__ import annotations

import cProfile
import itertools
import math
import os
import pstats
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from lgrpo import CausalPolicy, Prompt
from lgrpo.engines import TransformersEngine, VLLMEngine

SHAPES: dict[str, dict[str, int]] = {
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12}
    | {"num_key_value_heads": 2, "vocab_size": 151936},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151936},
    "demo": {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 3}
    | {"num_key_value_heads": 3},  # of configs/demo.yaml
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "vocab_size": 512},
}
CHARACTERS = "".join(map(chr, range(0x4E00, 0x4E00 + 400)))
DEMO_CHARACTERS = "0123456789>"
INSTRUCTION = "Think step by step, and end with the answer, a plain number."
SPREAD = 0.7
"""Standard deviation of the logarithm of a realistic length."""

Workload = Literal["fixed", "realistic", "real"]


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer of ``size`` tokens: padding, end of sequence, and words of letters after a space.

    A random model samples every id, so every id must be a word: a detokenizer that meets ids without text decodes a
    growing list of them again at every token. Words are decoded from bytes, as by the tokenizers of real models.

    >>> tokenizer = word_tokenizer(1000)
    >>> len(tokenizer), tokenizer(" a aa b").input_ids, tokenizer.decode([2, 3, 999])
    (1000, [2, 28, 3], ' a b alj')
    """
    words = ("".join(letters) for n in itertools.count(1) for letters in itertools.product(ascii_lowercase, repeat=n))
    tokens = ["<pad>", "<eos>", *(f"Ġ{word}" for word in itertools.islice(words, size - 2))]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<pad>", eos_token="<eos>")


def make_model(folder: Path, shape: str, longest: int) -> None:
    """Write a Hugging Face folder with a random model and a tokenizer that has a text for each of its ids."""
    from transformers import AutoModelForCausalLM, LlamaConfig  # qwen2 would load another tokenizer

    from lgrpo.policy import character_tokenizer

    is_demo = shape == "demo"
    tokenizer = character_tokenizer(DEMO_CHARACTERS) if is_demo else word_tokenizer(SHAPES[shape]["vocab_size"])
    size = {"vocab_size": len(tokenizer)} | SHAPES[shape]
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = LlamaConfig(**size, max_position_embeddings=longest, tie_word_embeddings=True, **special)
    with torch.device("meta"):  # transformers would initialise on one core: a minute at 1.5B
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to_empty(device="cpu").tie_weights()
    with ThreadPoolExecutor() as threads:
        list(threads.map(partial(_fill, config.initializer_range), enumerate(model.parameters())))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)  # config.json is the sign that the folder is complete


@torch.no_grad()
def _fill(spread: float, numbered: tuple[int, torch.nn.Parameter]) -> None:
    """Initialise a parameter reproducibly: 1 for norms, random otherwise."""
    seed, parameter = numbered
    if parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, spread, generator=torch.Generator().manual_seed(seed))


def random_policy(shape: str, longest: int) -> CausalPolicy:
    """Return a policy with random weights, on a GPU if there is one."""
    sizes = {"model_type": "llama", "max_position_embeddings": longest, "tie_word_embeddings": True, "vocab_size": 512}
    policy = CausalPolicy(config=sizes | SHAPES[shape], characters=CHARACTERS)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        policy.build()
    return policy


def cache_gib(config: PretrainedConfig, tokens: float) -> float:
    """Return the size of keys and values of ``tokens`` in two bytes each."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return tokens * config.num_hidden_layers * 2 * config.num_key_value_heads * head_dim * 2 / 2**30


def prompt_texts(folder: Path, num_tokens: int, count: int) -> list[str]:
    """Return texts of exactly ``num_tokens`` tokens each, drawn from the tokenizer's vocabulary."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    draw, texts = random.Random(1), list[str]()

    def word() -> str:
        while not (text := tokenizer.decode([draw.randrange(len(tokenizer))])).strip().isalnum():
            pass
        return text

    while len(texts) < count:
        text = "".join(word() for _ in range(num_tokens))
        if len(tokenizer(text).input_ids) == num_tokens:  # adjacent words may merge into one token
            texts.append(text)
    return texts


def real_prompts(data: Path, count: int) -> list[str]:
    """Return the first ``count`` training questions of GSM8K, in the order of its file, with an instruction."""
    from lgrpo.tasks import GSM8K

    rows = GSM8K(train=str(data)).rows("train")
    if len(rows) < count:
        raise ValueError(f"{data} has {len(rows)} training rows; this run needs {count}")
    return [f"{row['question']}\n\n{INSTRUCTION}" for row in rows[:count]]


def lengths(workload: Workload, count: int, fixed: int, mean: float, cap: int) -> list[int]:
    """Return the tokens of each completion: all equal, or log-normal with this mean (before the cap), at most ``cap``.

    With real prompts a completion ends where the model ends it: the cap is returned.

    >>> lengths("fixed", 3, 5, 0, 0)
    [5, 5, 5]
    >>> drawn = lengths("realistic", 10_000, 0, 300, 1024)
    >>> max(drawn), round(sum(drawn) / len(drawn), -1)
    (1024, 290.0)
    """
    if workload == "fixed":
        return [fixed] * count
    if workload == "real":
        return [cap] * count
    draw, centre = random.Random(2), math.log(mean) - SPREAD**2 / 2
    return [min(cap, max(1, round(draw.lognormvariate(centre, SPREAD)))) for _ in range(count)]


def prescribe_embedded(given: Sequence[int]) -> None:
    """Patch ``lgrpo.engines.TransformersEngine`` so that each completion ends at its length only."""
    from lgrpo.engines import transformers as embedded

    first, lengths_here = [0, 0], [torch.tensor([])]  # first index of this call and of the next one

    def prescribed(drawn: torch.Tensor, alive: torch.Tensor, *_: Any) -> torch.Tensor:
        if drawn.shape[1] == 1:
            first[:] = first[1], first[1] + len(drawn)
            lengths_here[0] = torch.tensor(given[first[0] : first[1]])
        return lengths_here[0][alive] == drawn.shape[1]

    embedded._stops = prescribed


def prescribe_generate(model: Any, eos: Sequence[int], given: Sequence[int]) -> None:
    """Patch ``model.generate`` of transformers so that each completion ends at its length only."""
    generate, first = model.generate, [0]

    def prescribed(*arguments: Any, **options: Any) -> Any:
        ids = options["input_ids"]
        ends = torch.tensor(given[first[0] : first[0] + len(ids)], device=ids.device)
        first[0] += len(ids)
        return generate(*arguments, logits_processor=[_EndsAt(ends, ids.shape[1], eos)], **options)

    model.generate = prescribed


class _EndsAt:
    """Logits processor that permits end-of-sequence at the given lengths only."""

    def __init__(self, ends: torch.Tensor, prompt_length: int, eos: Sequence[int]) -> None:
        self.ends, self.prompt_length, self.eos = ends, prompt_length, list(eos)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        is_last = self.ends == input_ids.shape[1] - self.prompt_length + 1
        scores[:, self.eos] = -torch.inf
        if is_last.any():
            scores[is_last] = -torch.inf
            scores[is_last, self.eos[0]] = 0.0
        return scores


def prescribe_vllm(given: Sequence[int]) -> None:
    """Patch ``vllm.LLM`` so that each request, and each sibling of a request with n > 1, ends at its length only."""
    from vllm import LLM
    from vllm.v1.engine.parallel_sampling import ParentRequest

    first = [0]

    def limited(original: Callable[..., Any]) -> Callable[..., Any]:
        def prescribed(self: Any, prompts: Any, params: Any = None, *more: Any, **options: Any) -> Any:
            params = options.pop("sampling_params", params)
            each = params if isinstance(params, list) else [params.clone() for _ in prompts]
            for one in each:
                counts = list(given[first[0] : first[0] + one.n])
                first[0] += one.n
                one.ignore_eos, one.stop_token_ids, one.max_tokens = True, [], max(counts)
                one._all_stop_token_ids = set()
                one.extra_args = {"lengths": counts}
            return original(self, prompts, each, *more, **options)

        return prescribed

    child = ParentRequest._get_child_sampling_params

    def sibling_params(self: Any, index: int) -> Any:
        self.cached_child_sampling_params = None  # the cached limit would apply to all siblings
        params = child(self, index)
        params.max_tokens = params.extra_args["lengths"][index]
        return params

    LLM.generate, LLM.enqueue = limited(LLM.generate), limited(LLM.enqueue)
    ParentRequest._get_child_sampling_params = sibling_params


class _Prescribed:
    """Engine for a pool: completions have the prescribed lengths of their position in the run, in whichever process."""

    given: Sequence[int] = ()
    group = 1
    profile: Path | None = None
    """Folder for a profile of the last generation, one file per process."""
    prescribe: Callable[[Sequence[int]], None]
    _order: list[int] | None = None
    """Lengths in the order in which this process generates."""

    def generate(self, prompts: Sequence[Prompt], *arguments: Any) -> Any:
        if self._order is None:
            self._order = []
            self.prescribe(self._order)
        for prompt in prompts:
            self._order += self.given[prompt.position * self.group : (prompt.position + 1) * self.group]
        generate = super().generate  # type: ignore[misc]
        if self.profile is None:
            return generate(prompts, *arguments)
        profiler = cProfile.Profile()
        try:
            return profiler.runcall(generate, prompts, *arguments)
        finally:
            with (self.profile / f"engine-{os.getpid()}.txt").open("w") as file:
                pstats.Stats(profiler, stream=file).sort_stats("tottime").print_stats(60)


class PrescribedVLLM(_Prescribed, VLLMEngine):  # type: ignore[misc]
    prescribe = staticmethod(prescribe_vllm)


class PrescribedEmbedded(_Prescribed, TransformersEngine):  # type: ignore[misc]
    prescribe = staticmethod(prescribe_embedded)
