"""Check the policy: log-probabilities, sources of models, precision."""

from __future__ import annotations

import gc
import json
import warnings
import weakref

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from lgrpo import CausalPolicy, ClippedLoss
from lgrpo.callbacks import SupervisedWarmStart
from lgrpo.losses import PolicyLogprobs
from lgrpo.policy import character_tokenizer
from lgrpo.policy.attention import PACKED
from lgrpo.policy.forward import choose_attention
from lgrpo.recordings.tokens import completion_token_ids
from lgrpo.types import StepTotals
from tests.helpers import CHARACTERS, MODEL, a_batch, fit, tiny_policy


def plain_logprobs(policy, batch, temperature):
    """Compute log-probabilities one row at a time, with all logits at once and without padding."""
    out = torch.zeros(batch.tokens.shape)
    for b in range(len(batch)):
        length = int(batch.lengths[b])
        logits = policy.model(input_ids=batch.tokens[b : b + 1, :length]).logits[0] / temperature
        rows = torch.log_softmax(logits, -1)
        for t in range(1, length):
            if batch.completion_mask[b, t]:
                out[b, t] = rows[t - 1, batch.tokens[b, t]]
    return out


@pytest.mark.parametrize("temperature", [0.3, 1.0])
@pytest.mark.parametrize("chunk_size", [5, 1024])
def test_logprobs_of_each_token_given_the_previous_ones(chunk_size, temperature):
    torch.manual_seed(0)
    policy, batch = tiny_policy(chunk_size=chunk_size), a_batch()
    policy.build()
    got, entropy = policy(batch.tokens, batch.completion_mask, temperature)
    assert torch.allclose(got, plain_logprobs(policy, batch, temperature), atol=1e-5)
    assert got.dtype == entropy.dtype == torch.float32
    assert bool((got[~batch.completion_mask] == 0).all())
    assert bool((entropy[batch.completion_mask] > 0).all())


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", **{k: v for k, v in MODEL.items() if k != "model_type"}},
        {"model_type": "gemma2", "head_dim": 32, "final_logit_softcapping": 2.0, **MODEL} | {"model_type": "gemma2"},
        {"model_type": "cohere", "logit_scale": 0.3, **MODEL} | {"model_type": "cohere"},
        {"model_type": "granite", "logits_scaling": 3.0, **MODEL} | {"model_type": "granite"},
    ],
    ids=lambda c: c["model_type"],
)
def test_architectures_that_scale_their_logits(config):
    torch.manual_seed(0)
    policy, batch = tiny_policy(config=config), a_batch()
    policy.build()
    got, _ = policy(batch.tokens, batch.completion_mask, 1.0)
    assert torch.allclose(got, plain_logprobs(policy, batch, 1.0), atol=1e-5)


def test_unknown_scaling_of_logits_is_refused(monkeypatch):
    from transformers.models.qwen2 import Qwen2ForCausalLM

    forward = Qwen2ForCausalLM.forward

    def scaled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 7 + 3
        return output

    monkeypatch.setattr(Qwen2ForCausalLM, "forward", scaled)
    with pytest.raises(ValueError, match="changes its logits"):
        tiny_policy().build()


def test_gradient_checkpointing_does_not_change_gradients():
    gradients = []
    for switch in (False, True):
        torch.manual_seed(0)
        policy, batch = tiny_policy(gradient_checkpointing=switch), a_batch()
        policy.build()
        policy.train()
        policy(batch.tokens, batch.completion_mask, 1.0)[0].sum().backward()
        gradients.append([p.grad for p in policy.parameters()])
        assert policy.model.is_gradient_checkpointing is switch
    for a, b in zip(*gradients, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(3)
    tokenizer = character_tokenizer(CHARACTERS)
    config = LlamaConfig(vocab_size=len(tokenizer), **{k: v for k, v in MODEL.items() if k != "model_type"})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_hugging_face_folder(folder):
    policy = CausalPolicy(name=str(folder))
    policy.build()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    for (name, a), (_, b) in zip(policy.weights(), loaded.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    assert policy.tokenizer.decode(policy.tokenizer("042>").input_ids) == "042>"
    assert policy.context_length == 32


def test_gradient_checkpointing_of_a_loaded_model(folder):
    """from_pretrained returns a model in evaluation mode, in which transformers checkpoints nothing."""
    policy = CausalPolicy(name=str(folder), gradient_checkpointing=True)
    policy.build()
    batch, seen = a_batch(), []
    hook = policy.model.base_model.layers[0].mlp.register_forward_pre_hook(lambda *_: seen.append(1))
    policy(batch.tokens, batch.completion_mask, 1.0)[0].sum().backward()
    hook.remove()
    assert len(seen) == 2, "once in the forward pass, once in the backward pass"


def test_dropout_is_off_and_all_eos_tokens_are_used(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_dropout": 0.5, "eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    policy, batch = CausalPolicy(name=str(folder)), a_batch()
    policy.build()
    policy.train()
    first, second = (policy(batch.tokens, batch.completion_mask, 1.0)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert policy.weights().config.eos_token_id == [1, 7]


def test_a_model_without_an_end_of_sequence_token(folder):
    """A warning, once; completions end at the length limit, and nothing appends a token that does not exist."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(settings | {"eos_token_id": None}))
    warm_start = SupervisedWarmStart(num_steps=1, batch_size=4)
    with pytest.warns(UserWarning, match="has an end-of-sequence token, so a completion ends only at") as caught:
        run = fit(
            rollouts=2, policy=CausalPolicy(name=str(folder)), loss=ClippedLoss(kl_coef=0.1), callbacks=[warm_start]
        )
    assert len([warning for warning in caught if "end-of-sequence" in str(warning.message)]) == 1
    for batch in run.recorder.rollouts:
        assert batch.truncated.all()
        assert (batch.completion_mask.sum(1) == run.data.sampling.max_tokens).all()
    assert completion_token_ids("42", "stop", run.data.tokenizer) == run.data.tokenizer("42").input_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CausalPolicy(name=str(folder)).build()


def test_rows_without_a_completion():
    """They have no log-probabilities and change no others; the graph exists without any, for the backward pass."""
    policy, batch = tiny_policy(), a_batch()
    policy.build()
    expected, _ = policy(batch.tokens, batch.completion_mask, 1.0)
    mask = batch.completion_mask.clone()
    mask[::2] = False
    got, entropy = policy(batch.tokens, mask, 1.0)
    assert torch.allclose(got[1::2], expected[1::2], atol=1e-6)
    assert not got[::2].any()
    got, entropy = policy(batch.tokens, torch.zeros_like(mask), 1.0)
    assert not got.any()
    assert not entropy.any()
    got.sum().backward()
    assert all(p.grad is None or not p.grad.any() for p in policy.parameters())


def test_a_model_without_a_pad_token(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match=r"no pad token: set policy\.pad_token"):
        CausalPolicy(name=str(folder)).tokenizer
    assert CausalPolicy(name=str(folder), pad_token=">").tokenizer.pad_token_id == 12
    with pytest.raises(ValueError, match="'<nothing>' is not a token"):
        CausalPolicy(name=str(folder), pad_token="<nothing>").tokenizer


def test_tokenizer_larger_than_the_model(folder):
    with pytest.raises(ValueError, match="do not belong together"):
        CausalPolicy(name=str(folder), characters=CHARACTERS + "abcdefgh").build()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "policy.name or a policy.config .* set one of the two"),
        ({"name": "a", "config": MODEL}, "set one of the two"),
        ({"config": {"hidden_size": 8}, "characters": "01"}, "no model_type"),
        ({"config": MODEL}, "needs a tokenizer"),
        ({"config": MODEL, "characters": "01", "tokenizer": "x"}, "exclude each other"),
        ({"config": MODEL, "characters": "01", "chunk_size": 0}, "chunk_size is 0"),
        (
            {"config": MODEL, "characters": "01", "activation_memory": 1.1},
            r"activation_memory is 1\.1; it must be at least 0 and at most 1",
        ),
        ({"config": MODEL, "characters": "01", "activation_memory": -0.1}, "activation_memory is -0.1"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        CausalPolicy(**settings)


def test_weights_list_a_tied_head_under_both_names():
    policy = tiny_policy()
    policy.build()
    weights = dict(policy.weights())
    assert torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])


def test_mixed_precision_trains_and_keeps_float32_logprobs():
    run = fit(v=2, i=1, rollouts=4, trainer={"precision": "bf16-mixed"})
    assert run.recorder.rollouts[0].behaviour_logprobs.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in run.weights.values())
    assert run.logged[0]["train/lag"] == 0
    assert abs(run.logged[0]["train/ratio_mean"] - 1) < 0.02, "bf16 rounds the policy's log-probabilities"


@pytest.mark.parametrize("precision", ["bf16-true", "16-true"])
def test_true_half_precision_is_refused(precision):
    with pytest.raises(ValueError, match=r"rounds every float of a batch.*bf16-mixed"):
        fit(trainer={"precision": precision})


SIZES = {
    "qwen2": {"num_key_value_heads": 1},
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 16},
    "mistral": {"num_key_value_heads": 1, "sliding_window": 4},
    "gpt_neox": {},
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},  # absolute positions from the start of each row
}


class TestPacking:
    """Packed rows give the same results as padded rows."""

    @pytest.mark.parametrize("model_type", SIZES)
    @pytest.mark.parametrize("gradient_checkpointing", [False, True])
    def test_equal_logprobs_and_gradients(self, model_type, gradient_checkpointing):
        size = {
            "model_type": model_type,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
        }
        found = []
        for attention in ("sdpa", "packed"):
            torch.manual_seed(0)
            policy = tiny_policy(
                config=size | SIZES[model_type],
                attention=attention,
                gradient_checkpointing=gradient_checkpointing,
                chunk_size=7,
            )
            policy.build()
            assert policy.attention == attention
            batch = a_batch(size=12, width=20, seed=3)
            logprobs, entropy = policy(batch.tokens, batch.completion_mask, 0.7)
            (logprobs * torch.arange(20)).sum().backward()
            found.append((logprobs, entropy, {name: p.grad for name, p in policy.named_parameters()}))
        (padded, padded_entropy, expected), (packed, packed_entropy, gradients) = found
        assert torch.allclose(padded, packed, atol=1e-5)
        assert torch.allclose(padded_entropy, packed_entropy, atol=1e-5)
        for name, gradient in expected.items():
            difference = (gradients[name] - gradient).norm() / gradient.norm().clamp(min=1e-12)
            assert difference < 1e-5, (name, float(difference))

    def test_rows_do_not_attend_to_each_other(self):
        policy = tiny_policy()
        policy.build()
        assert policy.attention == "packed"  # not "sdpa", the fallback
        batch = a_batch(size=8, width=12)
        together, _ = policy(batch.tokens, batch.completion_mask, 1.0)
        for row in range(8):
            alone, _ = policy(batch.tokens[row : row + 1], batch.completion_mask[row : row + 1], 1.0)
            assert torch.allclose(together[row], alone[0], atol=1e-5)

    def test_padding_after_a_completion_is_not_read(self):
        policy = tiny_policy()
        policy.build()
        batch = a_batch()
        before, _ = policy(batch.tokens, batch.completion_mask, 1.0)
        changed = torch.where(batch.attention_mask, batch.tokens, 5)
        assert torch.equal(before, policy(changed, batch.completion_mask, 1.0)[0])

    def test_an_architecture_that_does_not_support_packing_is_padded(self):
        size = {"model_type": "gemma2", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        size |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 32}
        policy = tiny_policy(config=size)
        with pytest.warns(UserWarning, match="Gemma2ForCausalLM cannot be packed, so rows are padded"):
            policy.build()
        assert policy.attention == "eager"
        batch = a_batch()
        logprobs, _ = policy(batch.tokens, batch.completion_mask, 1.0)
        assert logprobs[batch.completion_mask].lt(0).all()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_convolution_across_rows_is_found_with_small_weights(self, dtype):
        """LFM2 mixes neighbouring positions, across packed rows too; a new model has weights close to 0."""
        sizes = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv"]}
        config = AutoConfig.for_model("lfm2", **sizes, **heads)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED)
        if dtype == torch.bfloat16:  # the weights of a trained model
            model = model.to(dtype)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(8 if parameter.ndim > 1 else 1)
        assert choose_attention(model) == "sdpa"
        assert model.training
        assert model.config._attn_implementation == "sdpa"

    def test_experts_can_be_packed(self):
        sizes = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        config = AutoConfig.for_model("qwen3_moe", **sizes, **heads, **experts)
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED).to(dtype)
            assert choose_attention(model) == "packed", dtype

    def test_the_model_supports_padding_on_the_left(self):
        """The model's ``generate`` uses it."""
        policy = tiny_policy()
        policy.build()
        policy.model.eval()
        ids = torch.tensor([[0, 0, 5, 7, 3], [4, 6, 5, 7, 3]])
        mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded = policy.model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[0, -1]
        alone = policy.model(input_ids=ids[:1, 2:]).logits[0, -1]
        assert torch.allclose(padded, alone, atol=1e-5)


def a_rollout(size=12, width=20, group_size=4, seed=0):
    """Return rows of different lengths, with equal prompts in a group and one group masked."""
    batch = a_batch(size=size, width=width, group_size=group_size, seed=seed)
    for row in range(size):
        first = row // group_size * group_size
        start = int(batch.completion_mask[first].int().argmax())
        end = max(int(batch.lengths[row]), start + 1)
        batch.tokens[row, :start] = batch.tokens[first, :start]
        batch.attention_mask[row] = torch.arange(width) < end
        batch.completion_mask[row] = batch.attention_mask[row] & (torch.arange(width) >= start)
    batch.loss_mask = batch.completion_mask.clone()
    if size > group_size:
        batch.loss_mask[group_size : 2 * group_size] = False
    batch.behaviour_logprobs = torch.where(batch.completion_mask, -2.5 - torch.rand(size, width), 0.0)
    batch.advantages = torch.where(batch.completion_mask, torch.randn(size, 1), 0.0)
    tokens = float(batch.completion_mask.sum())
    batch.totals = StepTotals(
        all_tokens=tokens, live_tokens=float(batch.loss_mask.sum()), all_sequences=size, live_sequences=size
    )
    return batch


def gradients_of(policy, batch, logprobs):
    """Return the gradients of the clipped loss."""
    policy.zero_grad()
    loss = ClippedLoss(1.0, 10.0)(batch, PolicyLogprobs(policy=logprobs, entropy=torch.zeros_like(logprobs))).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters()}


def padded_logprobs(policy, batch, side):
    """Compute log-probabilities from padded rows and all logits, without packing, chunks or compilation."""
    size, width = batch.tokens.shape
    shift = (width - batch.lengths)[:, None] * (side == "left")
    column = torch.arange(width)
    source = (column - shift) % width  # index of each column's token in the row
    tokens, mask = batch.tokens.gather(1, source), batch.attention_mask.gather(1, source)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = policy.model(input_ids=tokens, attention_mask=mask.long(), position_ids=positions).logits
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(2, tokens[:, 1:, None]).squeeze(2)
    whole = torch.cat([torch.zeros(size, 1), logprobs], 1).gather(1, (column + shift) % width)
    return torch.where(batch.completion_mask, whole, 0.0)


def kept_bytes(policy, batch):
    """Return the bytes a forward pass keeps for the backward pass, without parameters, and its log-probabilities."""
    parameters = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logprobs, _ = policy(batch.tokens, batch.completion_mask, 1.0)
    return sum(kept.values()), logprobs


def relative_difference(a, b):
    return max(float((a[name] - b[name]).norm() / b[name].norm().clamp(min=1e-12)) for name in b)


class TestAgainstPaddedRows:
    """In float32, packed, chunked and compiled policies have the gradients of padded rows."""

    def both(self, **settings):
        policies = []
        for own in ({"attention": "sdpa"}, {"chunk_size": 5} | settings):
            torch.manual_seed(0)
            policies.append(tiny_policy(config=MODEL | {"num_hidden_layers": 2}, **own))
            policies[-1].build()
        return policies

    @pytest.mark.parametrize("side", ["left", "right"])
    @pytest.mark.parametrize("shape", [(12, 20, 4), (8, 9, 2), (1, 12, 1)])
    def test_packed_and_chunked(self, side, shape):
        plain, packed = self.both()
        batch = a_rollout(*shape)
        expected = gradients_of(plain, batch, padded_logprobs(plain, batch, side))
        got = gradients_of(packed, batch, packed(batch.tokens, batch.completion_mask, 1.0)[0])
        assert relative_difference(got, expected) < 1e-5

    @pytest.mark.slow("compiles")
    def test_compiled_once_for_all_shapes(self):
        plain, compiled = self.both(compile=True)

        def check(size, width, group_size):
            batch = a_rollout(size, width, group_size, seed=width)
            expected = gradients_of(plain, batch, padded_logprobs(plain, batch, "right"))
            got = gradients_of(compiled, batch, compiled(batch.tokens, batch.completion_mask, 1.0)[0])
            assert relative_difference(got, expected) < 1e-5

        graphs = torch._dynamo.utils.counters["stats"]
        before = graphs["unique_graphs"]
        check(12, 20, 4)
        assert graphs["unique_graphs"] == before + 1, "all layers share one graph"
        for shape in [(8, 14, 4), (20, 25, 5), (9, 11, 3), (6, 17, 2), (32, 31, 8)]:
            check(*shape)
        assert graphs["unique_graphs"] == before + 1

    @pytest.mark.slow("compiles")
    def test_a_later_run_of_the_process_compiles_nothing(self):
        """The code is kept when the first policy is gone, for other weights, losses and optimizers."""
        graphs, counts = torch._dynamo.utils.counters["stats"], []
        for seed, i, optimizer in ((0, 1, torch.optim.SGD), (1, 1, torch.optim.AdamW), (2, 2, torch.optim.AdamW)):
            run = fit(
                policy=tiny_policy(config=MODEL | {"num_hidden_layers": 2}, compile=True),
                seed=seed,
                i=i,
                loss=ClippedLoss(clip_low=0.1 + 0.1 * seed),
                optimizer=optimizer,
                trainer={"precision": "bf16-mixed"},
            )
            counts.append(graphs["unique_graphs"])
            gone = weakref.ref(run.module.policy.model)
            del run
            gc.collect()
            assert gone() is None
        assert counts[0] > 0
        assert len(set(counts)) == 1

    @pytest.mark.slow("compiles")
    def test_compiled_layers_keep_part_of_their_activations(self):
        """Several policies in one process have different budgets."""
        batch, kept = a_rollout(), {}
        plain = self.both()[0]
        expected = gradients_of(plain, batch, padded_logprobs(plain, batch, "right"))
        for share in (0.3, 1.0):
            compiled = self.both(compile=True, activation_memory=share)[1]
            kept[share], logprobs = kept_bytes(compiled, batch)
            assert relative_difference(gradients_of(compiled, batch, logprobs), expected) < 1e-5
        assert kept[0.3] < 0.6 * kept[1.0]
        assert torch._functorch.config.activation_memory_budget == 1.0, "other compiled code is not affected"
        assert self.both(activation_memory=0.3)[1].activation_memory == 1.0, "without compilation all are kept"

    @pytest.mark.slow("compiles")
    def test_activation_memory_with_gradient_checkpointing(self):
        plain, compiled = self.both(compile=True, activation_memory=0.3, gradient_checkpointing=True)
        batch = a_rollout()
        expected = gradients_of(plain, batch, padded_logprobs(plain, batch, "right"))
        kept, logprobs = kept_bytes(compiled, batch)
        assert kept < 0.5 * kept_bytes(self.both(compile=True, activation_memory=0.3)[1], batch)[0]
        assert relative_difference(gradients_of(compiled, batch, logprobs), expected) < 1e-5


class TestModelsThatCannotBeRead:
    def test_folders(self, tmp_path):
        with pytest.raises(
            FileNotFoundError, match=rf"policy\.name is {tmp_path}, a folder without config\.json: name"
        ):
            CausalPolicy(str(tmp_path))
        with pytest.raises(FileNotFoundError, match=r"policy\.name is \./nowhere: there is no such folder"):
            CausalPolicy("./nowhere")

    def test_a_folder_without_a_tokenizer(self, tmp_path):
        """transformers would return a tokenizer without tokens."""
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        with pytest.raises(FileNotFoundError, match=r"has no tokenizer .*: set policy\.tokenizer"):
            _ = CausalPolicy(str(tmp_path)).tokenizer

    @pytest.mark.parametrize("attribute", ["tokenizer", "config"])
    def test_a_hub_name_without_a_network(self, attribute, monkeypatch):
        """The hub is asked once, and the answer names the model and what to do."""
        asked = []

        def unreachable(url):
            asked.append(url)
            raise OSError("Name or service not known")

        monkeypatch.setattr("lgrpo.policy.loading.get_hf_file_metadata", unreachable)
        policy = CausalPolicy("nobody/no-model")
        with pytest.raises(
            ConnectionError, match=r"policy\.name is nobody/no-model.*service not known\)\. Download"
        ) as e:
            getattr(policy, attribute)
        assert "hf download nobody/no-model" in str(e.value)
        assert "HF_HUB_OFFLINE=1" in str(e.value)
        assert len(asked) == 1

    def test_an_invalid_hub_name(self):
        with pytest.raises(FileNotFoundError, match=r"policy\.name is bad name: there is neither such a folder nor"):
            _ = CausalPolicy("bad name").tokenizer
