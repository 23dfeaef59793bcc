"""Tokenizer and model: from the Hugging Face hub, from a folder, or made from an alphabet and from a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from lightning.pytorch.utilities import rank_zero_warn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

_TOKENIZER_FILES = ("tokenizer", "tokenization", "vocab", "spiece", "sentencepiece")
"""First letters of the files of a tokenizer. Without any of them transformers returns a tokenizer without tokens."""


def check_folder(setting: str, name: str, file: str = "config.json") -> None:
    """Raise a ``FileNotFoundError`` if a model's name is a folder without ``file``, or a path that does not exist."""
    path = Path(name)
    if path.is_dir():
        if not (path / file).is_file():
            raise FileNotFoundError(
                f"{setting} is {name}, a folder without {file}: name the folder that save_pretrained, a download or "
                "lgrpo export wrote"
            )
    elif path.is_absolute() or name.startswith(("./", "../", "~")) or name.count("/") > 1:
        raise FileNotFoundError(f"{setting} is {name}: there is no such folder")


def check_hub(setting: str, name: str, file: str = "config.json") -> None:
    """Raise an ``OSError`` if a hub name is not in the cache and cannot be downloaded.

    It asks the hub once. Without a network transformers takes minutes, because it tries again for every file.
    """
    if Path(name).is_dir():
        return
    try:
        files = (file,) if file == "config.json" else (file, "tokenizer.json", "config.json")
        if not any(isinstance(try_to_load_from_cache(name, each), str) for each in files):
            get_hf_file_metadata(hf_hub_url(name, file))
    except GatedRepoError as error:
        raise PermissionError(
            f"{setting} is {name}, which is gated: accept its conditions at https://huggingface.co/{name} and log in "
            "with hf auth login"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise FileNotFoundError(
            f"{setting} is {name}: there is neither such a folder nor such a model on the Hugging Face hub. Check the "
            "name; a private model needs hf auth login"
        ) from error
    except EntryNotFoundError as error:
        if file != "config.json":
            return  # a tokenizer may consist of other files
        raise FileNotFoundError(f"{setting} is {name}: this repository of the hub has no {file}") from error
    except HfHubHTTPError:
        return  # the hub answered, perhaps that it is busy: transformers tries again
    except Exception as error:  # of the HTTP library, which depends on the version of huggingface_hub
        reason = "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else str(error)
        raise ConnectionError(
            f"{setting} is {name}, which is neither a folder nor in the cache, and the Hugging Face hub cannot be "
            f"reached ({reason}). Download it where there is a network (hf download {name}) and give its folder, or "
            "copy the cache and set HF_HUB_OFFLINE=1"
        ) from error


def find_tokenizer(
    name: str | None, tokenizer: str | None, characters: str | None, pad_token: str | None, trust_remote_code: bool
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a policy with these settings."""
    if characters is not None:
        return character_tokenizer(characters)
    if tokenizer is not None:
        check_hub("policy.tokenizer", tokenizer, "tokenizer_config.json")
    elif name is not None:
        check_hub("policy.name", name)
    source = tokenizer or name
    assert source is not None, "the constructor of a policy checks it"
    return load_tokenizer(source, pad_token, trust_remote_code)


def load_tokenizer(source: str, pad_token: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return a tokenizer that has a pad token; raise a ``ValueError`` that says how to choose one if it has none."""
    if (folder := Path(source)).is_dir() and not any(f.name.startswith(_TOKENIZER_FILES) for f in folder.iterdir()):
        raise FileNotFoundError(
            f"the folder {source} has no tokenizer (tokenizer.json, tokenizer_config.json): set policy.tokenizer to "
            "the hub name or folder of one"
        )
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    if pad_token is not None:
        if pad_token not in tokenizer.get_vocab():
            raise ValueError(f"policy.pad_token {pad_token!r} is not a token of {source}")
        tokenizer.pad_token = pad_token
    if tokenizer.pad_token_id is None:
        raise ValueError(
            f"the tokenizer of {source} has no pad token: set policy.pad_token to one of its tokens that never "
            "occurs in a text, such as a reserved one"
        )
    return tokenizer


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, plus padding and end of sequence.

    >>> tokenizer = character_tokenizer("0123456789")
    >>> tokenizer("407").input_ids, tokenizer.decode([6, 2, 9])
    ([6, 2, 9], '407')
    """
    tokens = ["<pad>", "<eos>", *dict.fromkeys(characters)]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<pad>", eos_token="<eos>")


def load_model(
    name: str | None, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> PreTrainedModel:
    """Return the model ``name``, or one initialised at random from ``config``, in training mode and without dropout.

    With dropout two passes of one policy would differ, so there would be no ratio.
    """
    for key in config.to_dict():
        if key.endswith(("dropout", "pdrop", "dropout_prob")):
            setattr(config, key, 0.0)
    if name is not None:
        try:
            model = AutoModelForCausalLM.from_pretrained(name, config=config, **options)
        except OSError as error:
            reason = str(error).strip().splitlines()[0]
            raise FileNotFoundError(f"the weights of policy.name {name!r} cannot be loaded: {reason}") from error
    else:
        model = AutoModelForCausalLM.from_config(config, **options)
    model.config.eos_token_id = eos_token_ids(model, tokenizer)
    if not model.config.eos_token_id:
        rank_zero_warn(
            "neither tokenizer nor model has an end-of-sequence token, so a completion ends only at "
            "sampling.max_tokens or at a string of sampling.stop"
        )
    model.config.architectures = [type(model).__name__]
    num_embeddings = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > num_embeddings:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model only {num_embeddings}: they do not belong together"
        )
    return model.train()


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return every token that ends a sequence, of the tokenizer, the config and the generation config."""
    ids: set[int] = set()
    for source in (
        tokenizer.eos_token_id,
        model.config.eos_token_id,
        model.generation_config and model.generation_config.eos_token_id,
    ):
        ids |= set(source if isinstance(source, list) else [] if source is None else [source])
    return sorted(ids)
