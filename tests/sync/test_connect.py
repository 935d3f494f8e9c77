"""One plain vLLM and many trained models: what `connect` and `reshard` support and refuse."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from tests.ranks import message_of, run_ranks
from tests.sync.vllm_engines import build_llm
from tests.tiny_models import save_tiny, tiny_config

pytestmark = pytest.mark.multirank
pytest.importorskip("vllm", reason="the rollout engine; `make setup` installs it")

PROMPT = [5, 9, 33, 2] * 80  # longer than a block, so that its prefix is cached


def interleave(weight: torch.Tensor) -> torch.Tensor:
    """Alternate rows of the second half and of the first, as expert kernels need them."""
    first, second = weight.chunk(2)
    return torch.stack([second, first], 1).reshape(weight.shape)


def swap(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([weight[:, 64:], weight[:, :64]], 1)


REORDERED = {"gate_up_proj": interleave, "o_proj": swap}


def reorder_after_loading() -> None:
    """Let vLLM's linear layers permute weights after loading: one in place, one into new memory."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process = UnquantizedLinearMethod.process_weights_after_loading

    def reordering(self, layer: torch.nn.Module) -> None:
        process(self, layer)
        kind = layer.prefix.rpartition(".")[2]
        if kind == "gate_up_proj":
            layer.weight.data.copy_(interleave(layer.weight.data))
        elif kind == "o_proj":
            swapped = swap(layer.weight.data)
            if hasattr(layer, "reordered_once"):
                layer.weight.data.copy_(swapped)
            else:
                layer.weight.data = swapped
            layer.reordered_once = True

    UnquantizedLinearMethod.process_weights_after_loading = reordering


def build_model(kind: str = "llama", **changes) -> torch.nn.Module:
    """A sharded model with random weights; `changes` make it unlike the engine's."""
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    config = tiny_config(kind)
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return fully_shard(model)


class Case:
    """The engine under test."""

    def __init__(self, path: str) -> None:
        from hybridengine.engine.vllm.environment import prepare_environment

        prepare_environment()
        reorder_after_loading()
        self.llm = build_llm(path, max_model_len=512, kv_cache_memory_bytes=16 << 20)
        self.engine = self.llm.llm_engine
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner

    def wrong_tensors(self, model: torch.nn.Module) -> list[str]:
        """Which engine tensors are not what vLLM's loader, then its processing, make of `model`."""
        weights = {n: p.data for n, p in self.runner.get_model().named_parameters()}
        arrived = {name: tensor.clone() for name, tensor in weights.items()}
        for tensor in weights.values():
            tensor.fill_(float("nan"))
        full = ((n, p.full_tensor().bfloat16()) for n, p in model.named_parameters())
        self.runner.get_model().load_weights(full)
        for name, tensor in weights.items():
            for kind, reorder in REORDERED.items():
                if f".{kind}." in name:
                    tensor.copy_(reorder(tensor))
        wrong = [n for n, t in weights.items() if not torch.equal(t, arrived[n])]
        for name, tensor in weights.items():
            tensor.copy_(arrived[name])
        return wrong


def replaced(case: Case) -> dict:
    """Replace a model's tensors between syncs, as training scripts do."""
    from hybridengine.integrations.vllm import connect, reshard
    from hybridengine.sync.resharder import Resharder
    from hybridengine.sync.weight_target import PlanOutdatedError

    model, wrong, versions = build_model(), [], []
    resharder = connect(model, case.llm)
    engine = resharder.engine

    def sync(what: str) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-1.1)
        versions.append(resharder.sync(verify=True).version)
        wrong.extend(f"{what}: {name}" for name in case.wrong_tensors(model))

    sync("as planned")
    model.double().float()
    sync("a cast there and back")
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    sync("load_state_dict(assign=True)")
    model.bfloat16()
    outdated = message_of(resharder.sync)
    assert outdated.startswith(PlanOutdatedError.__name__)
    version = reshard(model, case.llm).version
    model.float()
    again = reshard(model, case.llm).version  # plans again
    wrong += case.wrong_tensors(model)
    return {
        "wrong": wrong,
        "versions": versions,
        "outdated": outdated,
        "reshard": (version, again),
        "not a function": message_of(lambda: Resharder(dict(model.named_parameters()), engine)),
    }


def alternating(case: Case) -> dict:
    """Two models with LoRA adapters, each with its own frozen base, in turn into one engine."""
    from peft import LoraConfig, get_peft_model

    from hybridengine.integrations.vllm import connect, reshard
    from hybridengine.model.parameters import unwrap_peft

    bases, models = [], []
    for seed in (1, 2):
        torch.manual_seed(seed)
        bases.append(build_model())
        adapters = LoraConfig(r=2, target_modules=["q_proj"])  # they begin at zero
        models.append(get_peft_model(build_model(), adapters))
        state = {n: p.full_tensor() for n, p in bases[-1].named_parameters()}
        own = dict(unwrap_peft(models[-1]).named_parameters())
        for name, parameter in own.items():
            plain = name.replace(".base_layer", "")
            if plain in state:
                with torch.no_grad():
                    parameter.to_local().copy_(state[plain])
    first, second = (connect(model, case.llm) for model in models)
    versions = [r.sync().version for r in (first, second, first)]
    wrong = case.wrong_tensors(bases[0])
    versions += [reshard(model, case.llm).version for model in (*models, models[0])]
    wrong += case.wrong_tensors(bases[0])
    second.finish_on_device = lambda phase: 1 / 0
    failed = message_of(second.sync)
    versions.append(reshard(models[0], case.llm).version)
    return {"versions": versions, "wrong": wrong + case.wrong_tensors(bases[0]), "failed": failed}


def busy(case: Case) -> dict:
    """Requests, caches, sleep and moved experts at the time of a sync."""
    from vllm import SamplingParams

    from hybridengine.integrations.vllm import connect

    model, engine = build_model(), case.engine
    resharder = connect(model, case.llm)
    version = resharder.sync().version
    sampling = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)
    prompt = {"prompt_token_ids": PROMPT}

    def generate() -> tuple[list[int], int]:
        (output,) = case.llm.generate([prompt], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids), output.num_cached_tokens

    results = {"first": generate()[1], "cached": generate()[1]}
    engine.add_request("r", prompt, sampling)
    engine.step()
    results["running"] = message_of(resharder.sync)
    results["moved"] = resharder.engine.weight_version != version
    engine.abort_request(["r"])
    case.runner.encoder_cache["image"] = torch.ones(2)
    scheduler = engine.engine_core.engine_core.scheduler
    scheduler.encoder_cache_manager.cached["image"] = set()
    resharder.sync()
    results["encoder"] = len(case.runner.encoder_cache)
    results["scheduler"] = len(scheduler.encoder_cache_manager.cached)
    results["after a sync"] = generate()[1]

    reset = case.llm.reset_prefix_cache
    case.llm.reset_prefix_cache = lambda **options: False
    results["kept cache"] = message_of(resharder.sync)
    results["generate"] = message_of(generate)
    case.llm.reset_prefix_cache = reset
    resharder.sync()

    engine.model_executor.sleeping_tags.add("weights")
    results["asleep"] = message_of(resharder.sync)
    engine.model_executor.sleeping_tags.clear()
    for level in (1, 2):
        engine.sleep(level)
        engine.wake_up()
        results[f"discarded at level {level}"] = resharder.engine.discarded
    resharder.sync()
    results["discarded after a sync"] = resharder.engine.discarded
    parallel, model_config = engine.vllm_config.parallel_config, engine.vllm_config.model_config
    for config, key, value in (
        (parallel, "enable_eplb", True),
        (parallel, "data_parallel_size", 2),
        (model_config, "quantization", "fp8"),
    ):
        before = getattr(config, key)
        setattr(config, key, value)
        results[key] = message_of(resharder.sync)
        results[f"connect {key}"] = message_of(lambda: connect(model, case.llm))
        setattr(config, key, before)
    results["tokens"] = generate()[0]
    return results


def unlike(case: Case) -> dict[str, str]:
    """Trained models that are not the engine's."""
    from hybridengine.integrations.vllm import connect

    models = {
        "larger MLP": build_model(intermediate_size=160),
        "more KV heads": build_model(num_key_value_heads=4),
        "untied head": build_model(tie_word_embeddings=False),
        "larger vocabulary": build_model(vocab_size=103),
        "more layers": build_model(num_hidden_layers=3),
        "biased": build_model(attention_bias=True),
    }
    integers = build_model()
    with torch.no_grad():
        for name, parameter in list(integers.named_parameters()):
            if name.endswith("norm.weight"):
                owner = integers.get_submodule(name.rpartition(".")[0])
                delattr(owner, "weight")
                owner.weight = torch.nn.Parameter(
                    torch.ones(parameter.shape, dtype=torch.int8), requires_grad=False
                )
    models["int8"] = integers
    models["another RoPE"] = build_model(
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}
    )
    models["another norm"] = build_model(rms_norm_eps=0.1)
    models["fewer, longer heads"] = build_model(
        num_attention_heads=2, num_key_value_heads=1, head_dim=64
    )
    models["no transformers model"] = torch.nn.Linear(4, 4)
    return {name: message_of(lambda m=m: connect(m, case.llm)) for name, m in models.items()}


def not_a_number(case: Case) -> dict:
    from hybridengine.integrations.vllm import connect

    model = build_model()
    with torch.no_grad():
        model.model.norm.weight.to_local().view(torch.int32)[0] = 0x7F800001  # a payload casts drop
        model.model.norm.weight.to_local()[1] = -float("nan")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resharder = connect(model, case.llm)
        version = resharder.sync(verify=True).version
    messages = [str(w.message) for w in caught if "NaN" in str(w.message)]
    return {"committed": resharder.engine.weight_version == version, "messages": messages}


def connect_body(rank: int, world_size: int, path: str) -> dict[str, dict]:
    case = Case(path)
    return {
        check.__name__: check(case) for check in (replaced, alternating, busy, unlike, not_a_number)
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    path: Path = tmp_path_factory.mktemp("llama")
    (result,) = run_ranks(connect_body, 1, save_tiny("llama", path), timeout_s=400)
    return result


def test_replaced_tensors_and_reordered_weights_are_followed(results) -> None:
    """The engine reorders two kinds of weights after loading, one in place, one into new memory."""
    result = results["replaced"]
    assert result["wrong"] == []
    assert result["versions"] == [1, 2, 3]
    assert "changed its dtype from torch.float32 to torch.bfloat16" in result["outdated"]
    assert "connect()" in result["outdated"]
    first, again = result["reshard"]
    assert again == first + 1
    assert result["not a function"].startswith(
        "TypeError: parameters: got a dict, expected a function"
    )


def test_connections_that_alternate_leave_no_weights_of_each_other(results) -> None:
    result = results["alternating"]
    assert result["wrong"] == []
    first = result["versions"][0]
    assert result["versions"] == list(range(first, first + 7)), "they rise whoever syncs"
    assert "ZeroDivisionError" in result["failed"]


def test_a_busy_or_changed_engine_is_refused(results) -> None:
    result = results["busy"]
    assert result["first"] == 0 < result["cached"], "the prefix cache is on"
    assert "LayoutError: on rank 0: the engine has 1 unfinished request" in result["running"]
    assert "abort" in result["running"] and not result["moved"]
    assert result["after a sync"] == 0, "the prefix of older weights is reused"
    assert result["encoder"] == result["scheduler"] == 0
    assert "ReshardError: on rank 0: vLLM did not drop its prefix cache" in result["kept cache"]
    assert "StaleWeightsError" in result["generate"]
    assert "the engine sleeps" in result["asleep"] and "wake_up" in result["asleep"]
    moments = ("at level 1", "at level 2", "after a sync")
    assert [result[f"discarded {when}"] for when in moments] == [False, True, False]
    for key in ("enable_eplb", "data_parallel_size", "quantization"):
        assert f"{key}: " in result[key] and f"{key}: " in result[f"connect {key}"]
    assert len(result["tokens"]) == 4


@pytest.mark.parametrize(
    ("kind", "parameter", "key"),
    [
        ("larger MLP", "mlp", "intermediate_size (160 in the trained model, 96 in the engine)"),
        ("more KV heads", "self_attn", "num_key_value_heads (4 in the trained model, 2 in"),
        ("untied head", "lm_head.weight", "tie_word_embeddings (False in the trained model, True"),
        ("larger vocabulary", "embed_tokens", "vocab_size (103 in the trained model, 101 in"),
        ("more layers", "layers.2", "num_hidden_layers (3 in the trained model, 2 in the engine)"),
        ("biased", "bias", "attention_bias (True in the trained model, False in the engine)"),
    ],
)
def test_a_model_that_is_not_the_engines_is_refused(results, kind, parameter, key) -> None:
    message = results["unlike"][kind]
    assert message.startswith("LayoutError: "), message
    assert parameter in message and key in message, message


@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("another RoPE", "rope_parameters.rope_theta (500000.0 in the trained model"),
        ("another norm", "rms_norm_eps (0.1 in the trained model"),
        ("fewer, longer heads", "num_attention_heads (2 in the trained model"),
    ],
)
def test_a_model_that_computes_another_function_is_refused(results, kind, key) -> None:
    message = results["unlike"][kind]
    assert message.startswith("LayoutError: "), message
    assert "another function of the trained weights" in message and key in message, message


def test_a_model_of_another_library_is_refused(results) -> None:
    message = results["unlike"]["no transformers model"]
    assert message.startswith("TypeError: model: got a Linear, expected a transformers model")


def test_quantized_parameters_are_refused(results) -> None:
    message = results["unlike"]["int8"]
    assert "LayoutError" in message and "norm.weight' is torch.int8" in message, message


def test_nan_is_reported_as_nan(results) -> None:
    result = results["not_a_number"]
    assert result["committed"]
    (message,) = result["messages"]
    assert "'model.norm.weight'" in message
