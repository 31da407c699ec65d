"""Models: 4-bit weights, adapters that are loaded, merged for rollouts, and written for good."""

import json
import math
import re

import pytest
import torch
from conftest import QUESTION, TINY_MODEL, WORLD, CountingRetriever, adamw, log_of, trainable
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import eval as evaluation
import rollout as ro
import train as tr
from plumbing import adapters, checks, models, options, runs
from plumbing.files import DataError
from plumbing.models import encode
from plumbing.prompts import encode_prompt
from reward import TAGS
from train import TrainSettings


def load_moved(scale):
    """The tiny Policy with an adapter that is not zero."""
    policy = models.load_trainable(TrainSettings())
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=scale)
    return policy


def test_one_step_in_4bit(run_train, tmp_path, played):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="4-bit needs bitsandbytes")
    small = ["--steps", "1", "--eval_questions", "", "--name", "q"]
    folder = run_train(tmp_path, "--load_in_4bit", "true", *small)
    assert math.isfinite(log_of(folder)[0]["loss"])
    assert json.loads((folder / "config.json").read_text())["load_in_4bit"]
    model, _ = models.load_trainable(TrainSettings(load_in_4bit=True), folder / "adapter")
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(bitsandbytes.nn.Linear4bit) == 28
    advantages = torch.linspace(-1, 1, len(played))
    tr.update(model, adamw(model), played, advantages, 1e-3, TrainSettings())
    assert all(p.norm() > 0 for name, p in model.named_parameters() if "lora_B" in name)


def test_4bit_without_bitsandbytes_is_one_line(monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="bitsandbytes, which is not installed"):
        options.parse_training(TrainSettings, ["--load_in_4bit", "true"], "")
    assert options.parse_training(TrainSettings, [], "")[0].load_in_4bit is False


def test_a_loaded_adapter_stays_trainable(lora, tmp_path):
    runs.save_checkpoint(lora.model, adamw(lora.model), 3, tmp_path / "adapter")
    again, _ = models.load_trainable(TrainSettings(), runs.find_checkpoint(tmp_path))
    sizes = [p.numel() for p in trainable(again)]
    assert sizes == [p.numel() for p in trainable(lora.model)] and sum(sizes) > 0


def test_rollouts_use_the_adapter_and_leave_the_weights_as_they_were(played):
    model, _ = load_moved(0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([played[0].prompt_ids])
    model.eval()
    with torch.no_grad():
        adapted = model(ids).logits
        with model.disable_adapter():
            assert not torch.allclose(adapted, model(ids).logits, atol=0.1)
        model.train()
        with adapters.inference_weights(model):
            assert not model.training
            torch.testing.assert_close(model(ids).logits, adapted, atol=1e-3, rtol=1e-3)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_merging_writes_an_ordinary_model(tmp_path):
    model, tokenizer = load_moved(0.05)
    model.eval()
    runs.save_checkpoint(model, adamw(model), 1, tmp_path / "run" / "adapter")
    (tmp_path / "run" / "config.json").write_text("{}")
    arguments = ["--resume", str(tmp_path / "run"), "--merge", str(tmp_path / "merged")]
    tr.main(arguments)
    merged, again = models.load_policy(tmp_path / "merged")
    prompt = "Who is the author of Amber Ivy?", ro.SYSTEM_PROMPT
    ids = encode_prompt(tokenizer, *prompt)
    assert encode_prompt(again, *prompt) == ids
    ids = torch.tensor([ids])
    with torch.no_grad():
        difference = (merged(ids).logits - model(ids).logits).abs().max()
        with model.disable_adapter():
            without = (merged(ids).logits - model(ids).logits).abs().max()
    assert difference < 0.2 * without, "bfloat16 rounds, but the adapter must be there"
    with pytest.raises(DataError, match="exists already"):
        tr.main(arguments)
    with pytest.raises(DataError, match="--merge: needs --resume"):
        tr.main(["--merge", "x"])


# Other models: what is trained must be what was sampled

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "bos_token_id": None}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "eos_token_id": None}
SMALL = {"max_turn_tokens": 12, "max_self_answer_tokens": 5, "max_context": 200, "max_searches": 1}


def other_model(folder, kind, **more):
    """A folder with a small model of random weights, of another kind, and the tiny tokenizer."""
    tokenizer = models.load_tokenizer(TINY_MODEL)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def small_settings(folder, **more):
    """Settings to train it, on short texts."""
    return TrainSettings(model=folder, **SMALL, **more)


def updated(settings, steps=1, rate=0.05):
    """[losses of each step] and the policy after them, on rollouts of one question."""
    policy = models.load_trainable(settings)
    optimizer, advantages, losses = adamw(policy.model), torch.linspace(-1, 1, 4), []
    policy.model.train()
    for step in range(steps):
        with adapters.inference_weights(policy.model):
            sampling = ro.Sampling(4, settings.temperature, step)
            played = ro.rollout(policy, [QUESTION], CountingRetriever(), settings, sampling)
        losses.append(tr.update(policy.model, optimizer, played, advantages, rate, settings))
    return losses, policy


ELSEWHERE = [
    ("granite", {"logits_scaling": 8.0}),
    ("granitemoe", {"logits_scaling": 8.0, "num_local_experts": 4}),
    ("hyperclovax", {"logits_scaling": 8.0}),
    ("cohere", {"logit_scale": 0.0625, "pad_token_id": 0}),
    ("granite", {"logits_scaling": 1.001}),
]


@pytest.mark.parametrize("kind, more", ELSEWHERE)
def test_logits_that_the_loss_would_get_wrong_are_refused(tmp_path, kind, more):
    folder = other_model(tmp_path / "m", kind, **SHAPE, **more)
    with pytest.raises(DataError, match="m: not supported: its logits would be trained"):
        models.load_trainable(small_settings(folder))


def test_dropout_that_no_setting_names_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_config", lambda path, _: AutoConfig.from_pretrained(path))
    folder = other_model(tmp_path / "m", "gpt2", n_embd=32, n_layer=2, n_head=2)
    with pytest.raises(DataError, match="its logits would be trained"):
        models.load_trainable(small_settings(folder))


WITH_DROPOUT = [
    ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    ("opt", {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.3}),
    ("biogpt", {"hidden_size": 32, "intermediate_size": 64}),
    ("xglm", {"d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 2}),
]
WITH_DROPOUT[1][1].update(num_hidden_layers=2, num_attention_heads=2)
WITH_DROPOUT[2][1].update(num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize("kind, more", WITH_DROPOUT)
@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_no_dropout_where_log_probabilities_are_taken(tmp_path, kind, more, gradient_checkpointing):
    """A fresh adapter has KL 0, and the gradient does not depend on a seed."""
    folder, gradients = other_model(tmp_path / "m", kind, **more), []
    checkpointing = {"gradient_checkpointing": gradient_checkpointing}
    settings = small_settings(folder, beta=0.5, num_iterations=2, **checkpointing)
    (losses,), policy = updated(settings, rate=0.0)
    assert losses["kl"] == 0 and losses["clip_ratio"] == 0
    assert losses["sampling_logp_difference/max"] < 1e-5
    batch = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    batch["completion_mask"] = torch.tensor([[0, 1, 1, 1]])
    for seed in (1, 2):
        torch.manual_seed(seed)
        logps, _ = tr.per_token_logps(policy.model, batch, 1.0)
        gradients.append(torch.autograd.grad(logps.sum(), trainable(policy.model)))
    assert all(map(torch.equal, *gradients)) and any(g.any() for g in gradients[0])


EXPERTS = [
    ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16}),
    ("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    ("olmoe", {"num_experts": 4}),
]


@pytest.mark.parametrize("kind, more", EXPERTS)
def test_experts_are_trained_as_they_sample(tmp_path, kind, more):
    """Their weights are no linear layers, and `all-linear` adapts them all the same."""
    folder = other_model(tmp_path / "m", kind, **SHAPE, **more, num_experts_per_tok=2)
    losses, policy = updated(small_settings(folder), steps=3)
    assert losses[-1]["grad_norm"] > 0
    assert max(row["sampling_logp_difference/max"] for row in losses) < 1e-4
    fresh = models.load_base_model(folder).state_dict()
    base = policy.model.unload().state_dict()
    assert all(torch.equal(weight, base[name]) for name, weight in fresh.items())


def test_keys_and_values_may_differ_in_size(tmp_path):
    """DeepSeek's do: 16 and 8."""
    heads = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    heads |= {"v_head_dim": 8, "num_key_value_heads": 2, "first_k_dense_replace": 2}
    folder = other_model(tmp_path / "m", "deepseek_v3", **SHAPE | heads)
    losses, _ = updated(small_settings(folder), steps=3)
    assert max(row["sampling_logp_difference/max"] for row in losses) < 1e-4


WITHOUT_CACHE = [  # it is not there, or not with padding on the left
    ("rwkv", {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32}),
    ("openai-gpt", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    ("mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512}),
    ("bart", {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2}),
]


@pytest.mark.parametrize("kind, more", WITHOUT_CACHE)
def test_models_whose_cache_changes_the_logits_are_refused(tmp_path, kind, more):
    folder = other_model(tmp_path / "m", kind, **more)
    for load in (
        lambda: models.load_trainable(small_settings(folder)),
        lambda: models.load_policy(folder),
    ):
        with pytest.raises(DataError, match="m: not supported: "):
            load()


TIED = [".*lm_head", ".*embed_tokens", ".*(q_proj|lm_head)"]


@pytest.mark.parametrize("targets", [*TIED, "nothing", "(", ".*norm"])
def test_layers_that_cannot_have_an_adapter_are_one_line(tmp_path, monkeypatch, targets):
    """The tiny model ties its embeddings: merging would change both."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"^--lora_targets {re.escape(targets)}: [^\n]+$"):
        tr.main(["--lora_targets", targets])
    assert not list(tmp_path.iterdir())


def test_an_untied_head_can_have_an_adapter(tmp_path):
    folder = other_model(tmp_path / "m", "qwen2", tie_word_embeddings=False, **SHAPE)
    losses, _ = updated(small_settings(folder, lora_targets=".*lm_head"), steps=3)
    assert max(row["sampling_logp_difference/max"] for row in losses) < 1e-4


def test_a_foreign_adapter_of_tied_embeddings_is_refused(tmp_path):
    adapted = get_peft_model(
        models.load_base_model(TINY_MODEL), LoraConfig(target_modules=["lm_head"])
    )
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    with pytest.raises(DataError, match="matrix that input and output embeddings share"):
        models.load_policy(TINY_MODEL, tmp_path)


FAMILIES = [
    ("qwen3", {"head_dim": 16}),
    ("llama", {}),
    ("mistral", {"sliding_window": 200}),
    ("phi3", {"sliding_window": 4096, "pad_token_id": 0}),
    ("gemma", {"head_dim": 16}),
    ("gpt_neox", {"pad_token_id": 0}),
    ("olmo2", {}),
]


@pytest.mark.parametrize("kind, more", FAMILIES)
def test_families_of_models_train_as_they_sample(tmp_path, kind, more):
    """With a window too, as long as no trajectory leaves it; and after a cold start."""
    folder = other_model(tmp_path / "m", kind, **SHAPE | more)
    settings = small_settings(folder, cold_start=1)
    models.check_model(folder, models.load_tokenizer(folder), settings.max_context)
    losses, _ = updated(settings, steps=3)
    assert losses[-1]["grad_norm"] > 0
    assert max(row["sampling_logp_difference/max"] for row in losses) < 1e-4


def test_windows_that_a_trajectory_leaves_are_refused(tmp_path):
    folder = other_model(tmp_path / "m", "mistral", **SHAPE, sliding_window=199)
    with pytest.raises(DataError, match="only models with full attention"):
        models.check_model(folder, models.load_tokenizer(folder), SMALL["max_context"])


def test_models_that_mix_up_self_answers_get_no_cold_start(tmp_path):
    """BLOOM's positions come from a mask of two dimensions."""
    folder = other_model(tmp_path / "m", "bloom", hidden_size=32, n_layer=2, n_head=2)
    assert updated(small_settings(folder))[0][0]["grad_norm"] > 0
    with pytest.raises(DataError, match="m: no cold start"):
        models.load_trainable(small_settings(folder, cold_start=1))


def test_branches_that_see_each_other_are_noticed(tiny):
    class Blind(torch.nn.Module):
        """A model that forgets the mask it is given."""

        device, dtype = tiny.model.device, tiny.model.dtype

        def forward(self, input_ids, attention_mask=None, **inputs):
            return tiny.model(input_ids=input_ids, **inputs)

    ids = encode(tiny.tokenizer, " ".join(TAGS))
    checks.check_branches(tiny.model, ids, "m")
    with pytest.raises(DataError, match="m: no cold start: self-answers change each other's"):
        checks.check_branches(Blind(), ids, "m")


def test_what_cannot_be_trained_is_refused_before_the_weights_load(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_base_model", pytest.fail)
    monkeypatch.chdir(tmp_path)
    other_model(tmp_path / "state_space", "mamba", hidden_size=32, num_hidden_layers=2)
    with pytest.raises(DataError, match="only models with full attention"):
        tr.main(["--model", "state_space"])
    short = AutoConfig.for_model("qwen2", vocab_size=400, **SHAPE)
    AutoModelForCausalLM.from_config(short).save_pretrained("short")
    models.load_tokenizer(TINY_MODEL).save_pretrained("short")
    for script in (tr.main, evaluation.main):
        with pytest.raises(DataError, match="an id 470, the model 400 embeddings"):
            script(["--model", "short", *files_of("questions", "corpus")])
    assert not (tmp_path / "runs").exists()


def files_of(*names):
    """Options that name the shipped world's files."""
    paths = {"questions": WORLD / "dev.jsonl", "corpus": WORLD / "dev_corpus.jsonl"}
    return [word for name in names for word in (f"--{name}", str(paths[name]))]


def test_sampling_and_training_agree_and_a_broken_merge_shows():
    settings = small_settings(str(TINY_MODEL), temperature=0.7)
    losses, policy = updated(settings, steps=3)
    assert max(row["sampling_logp_difference/max"] for row in losses) < 1e-4
    assert all(row["sampling_logp_difference/mean"] > 0 for row in losses)
    sampling = ro.Sampling(4, 0.7)
    with policy.model.disable_adapter():  # sampled without what is trained
        policy.model.eval()
        played = ro.rollout(policy, [QUESTION], CountingRetriever(), settings, sampling)
    row = tr.update(policy.model, adamw(policy.model), played, torch.ones(4), 0.0, settings)
    assert row["sampling_logp_difference/max"] > row["sampling_logp_difference/mean"] > 0.01


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_products_of_a_16_bit_model_are_of_16_bits(monkeypatch, played, world, load_in_4bit):
    """The adapter's too, whose weights stay float32: in rollouts and in the update."""
    if load_in_4bit:
        pytest.importorskip("bitsandbytes", reason="4-bit needs bitsandbytes")
    monkeypatch.setattr(models, "device_and_dtype", lambda: ("cpu", torch.bfloat16))
    policy = models.load_trainable(TrainSettings(load_in_4bit=load_in_4bit))
    kinds = set()
    for name, module in policy.model.named_modules():
        if "lora_" in name and isinstance(module, torch.nn.Linear):
            assert module.weight.dtype == torch.float32
            module.register_forward_hook(lambda module, inputs, out: kinds.add(out.dtype))
    with adapters.inference_weights(policy.model):
        ro.rollout(policy, world.questions[:1], world.retriever, TrainSettings())
    assert kinds == {torch.bfloat16}
    kinds.clear()
    tr.update(policy.model, adamw(policy.model), played, torch.ones(12), 0.0, TrainSettings())
    assert kinds == {torch.bfloat16}


def test_a_tokens_small_share_does_not_vanish_in_float16(monkeypatch, played):
    """Divided by the tokens of a step before the backward pass, 2**16 here, gradients would be too
    small for float16; divided after it, they are those of float32."""
    clip, gradients = torch.nn.utils.clip_grad_norm_, {}
    for kind in (torch.float32, torch.float16):
        torch.manual_seed(0)
        model = models.load_trainable(TrainSettings()).model
        for weight in model.parameters():
            weight.data = weight.data if weight.requires_grad else weight.data.to(kind)

        def note(parameters, *arguments, kind=kind, model=model):
            gradients[kind] = torch.cat([p.grad.flatten().double() for p in trainable(model)])
            return clip(parameters, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.utils, "clip_grad_norm_", note)
            patch.setattr(ro.Trajectory, "tokens", 2**16 // len(played))
            tr.update(model, adamw(model), played, torch.ones(12), 0.0, TrainSettings())
    assert torch.cosine_similarity(*gradients.values(), dim=0) > 0.999


@pytest.mark.parametrize("load_in_4bit", [False, True])
def test_sampling_and_training_nearly_agree_in_bfloat16(monkeypatch, world, load_in_4bit):
    """The README's numbers for it, on a CPU: mean 0.0005, maximum 0.06."""
    if load_in_4bit:
        pytest.importorskip("bitsandbytes", reason="4-bit needs bitsandbytes")
    monkeypatch.setattr(models, "device_and_dtype", lambda: ("cpu", torch.bfloat16))
    settings = TrainSettings(load_in_4bit=load_in_4bit)
    policy = models.load_trainable(settings)
    sampling = ro.Sampling(4, self_answers=False)
    with adapters.inference_weights(policy.model):
        played = ro.rollout(policy, world.questions[:4], world.retriever, settings, sampling)
    advantages = torch.ones(len(played))
    row = tr.update(policy.model, adamw(policy.model), played, advantages, 0.0, settings)
    assert 1e-5 < row["sampling_logp_difference/mean"] < 0.001
    assert 1e-3 < row["sampling_logp_difference/max"] < 0.1
