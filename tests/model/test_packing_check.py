"""A model that computes packed sequences otherwise than each alone is refused as it loads."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from hybridengine.model import packing_check
from hybridengine.model.packing_check import check_packing, shared_prefix_obstacle
from hybridengine.model.validation import check_model, packing_obstacle, takes_images
from hybridengine.run.errors import ModelError
from hybridengine.vision.formats import IMAGE_MODEL_TYPES
from tests.architectures.catalogue import CATALOGUE
from tests.extras.vision.vision_models import vision_config
from tests.model.own_code import DROPS_ARGUMENTS, SELECTS_KEYS, UNCHANGED, save_own_code
from tests.model.rotary_configs import DYNAMIC, LONG_ROPE
from tests.tiny_models import tiny_config

# They are found by their packed forward alone.
REFUSED = {
    "nemotron": r"NemotronAttention \(layer 0\) uses position_ids that restart",
}
CHEAP = [
    "llama",
    "gpt_oss",
    "gemma2",
    "gemma3_text",
    "deepseek_v3",
    "glm4_moe",
    "gpt2",
    "qwen2_5_vl",
]


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(packing_check, "OUTCOMES", {})


def runnable() -> list[str]:
    """The architectures of the catalogue whose configuration and class can run packed."""
    names = []
    for name, entry in CATALOGUE.items():
        try:
            config = entry.config()
        except ValueError:  # not in transformers
            continue
        text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or takes_images(config)
        if text and packing_obstacle(config) is None:
            names.append(name)
    return names


def check(name: str) -> None:
    config = CATALOGUE[name].config()
    if name in REFUSED:
        with pytest.raises(ModelError, match=REFUSED[name]):
            check_packing(name, config)
    else:
        check_packing(name, config)
        assert shared_prefix_obstacle(config) is None


@pytest.mark.parametrize("name", [*CHEAP, *REFUSED])
def test_architectures(name):
    check(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", runnable())
def test_every_architecture(name):
    check(name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", IMAGE_MODEL_TYPES)
def test_every_vision_language_model(kind):
    check_packing(kind, vision_config(kind))
    assert shared_prefix_obstacle(vision_config(kind)) is None


@pytest.mark.parametrize("kind", ["qwen2_moe", "phimoe"])
def test_a_window_that_is_only_in_the_mask(kind):
    config = CATALOGUE[kind].config()
    config.max_position_embeddings = 8192
    config.sliding_window = 4096
    if kind == "qwen2_moe":
        config.layer_types = ["full_attention", "sliding_attention"]
    layer = {"qwen2_moe": 1, "phimoe": 0}[kind]
    with pytest.raises(ModelError, match=rf"layers\.{layer}\.self_attn .*differ.*sliding window"):
        check_packing("m", config)
    config.sliding_window = 8192  # which no sequence exceeds
    packing_check.OUTCOMES.clear()
    check_packing("m", config)


def test_a_rotary_embedding_that_depends_on_the_batch(monkeypatch):
    """By something else than its longest sequence, which `fix_rotary_length` takes care of."""
    config = tiny_config("llama")
    for rope in (DYNAMIC, LONG_ROPE):
        config.rope_parameters = dict(rope)
        check_packing("m", config)
    config.rope_parameters = dict(DYNAMIC, factor=3.0)
    forward = LlamaRotaryEmbedding.forward

    def scaled(self, x, position_ids):
        return forward(self, x, position_ids * position_ids.float().mean())

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", scaled)
    with pytest.raises(ModelError, match=r"model\.rotary_emb \(LlamaRotaryEmbedding\) .*the batch"):
        check_packing("m", config)


def test_own_code_that_drops_arguments(tmp_path: Path):
    path = save_own_code(tmp_path, DROPS_ARGUMENTS)
    config = check_model(path, trust_remote_code=True)
    with pytest.raises(
        ModelError,
        match=r"layers\.1\.self_attn \(OwnAttention\) .* does not pass cu_seq_lens_q",
    ):
        check_packing(path, config, trust_remote_code=True)
    check_packing(path, config)  # transformers' own Llama


def test_own_code_that_selects_keys_of_the_batch(tmp_path: Path):
    """Sequences of the small copy are shorter than the number of keys, which is small in it."""
    path = save_own_code(tmp_path, SELECTS_KEYS, index_topk=2048)
    config = check_model(path, trust_remote_code=True)
    with pytest.raises(ModelError, match=r"layers\.1\.self_attn \(OwnAttention\) .* another seq"):
        check_packing(path, config, trust_remote_code=True)


@pytest.mark.parametrize(
    ("kind", "sparse"),
    [
        ("deepseek_v32", ["indexed_attention"]),
        ("deepseek_v4", ["compressed_sparse_attention", "heavily_compressed_attention"]),
        ("glm_moe_dsa", ["indexed_attention"]),
        ("minimax_m3_vl", ["minimax_m3_sparse"]),
    ],
)
def test_sparse_attention(kind, sparse):
    """An indexer selects keys among all of a packed row; without such layers a type can pack."""
    config = CATALOGUE[kind].config().get_text_config()
    assert f"type {sparse} select or compress keys" in str(packing_obstacle(config))
    with pytest.raises(ModelError):  # nor does the code run packed, whatever its layers are called
        packing_check.find_faults(packing_check.Probe(config, trust_remote_code=False), seed=0)
    dense = {"minimax_m3_vl": "full_attention", "deepseek_v4": "sliding_attention"}
    if kind in dense:
        config.layer_types = [dense[kind]] * config.num_hidden_layers
        assert shared_prefix_obstacle(config) is None


def test_own_code_of_a_known_name_shares_no_prefixes(tmp_path: Path):
    path = save_own_code(tmp_path, UNCHANGED)
    config = check_model(path, trust_remote_code=True)
    check_packing(path, config, trust_remote_code=True)
    reason = shared_prefix_obstacle(config, trust_remote_code=True)
    assert reason == "its own code (llama) may read the sequence in packed order"
    assert shared_prefix_obstacle(config) is None


def test_a_layer_that_reads_the_packed_order_shares_no_prefixes(monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def mixing(self, x):  # each token reads the one before it, of its sequence if it is alone
        return forward(self, x + 0.5 * torch.nn.functional.pad(x, (0, 0, 1, -1)))

    monkeypatch.setattr(LlamaMLP, "forward", mixing)
    reason = shared_prefix_obstacle(tiny_config("llama"))
    assert "layers.0.mlp (LlamaMLP) computes values that differ by" in str(reason)


def test_a_tie_of_a_router_is_no_leak(monkeypatch):
    """One draw of weights that differs is not enough, as it would be with a leak."""
    faults = packing_check.find_faults
    seeds = []

    def tie(probe, seed):
        seeds.append(seed)
        return packing_check.Outcome("a tie") if seed == 0 else faults(probe, seed)

    monkeypatch.setattr(packing_check, "find_faults", tie)
    check_packing("m", tiny_config("qwen3_moe"))
    assert seeds == [0, 1]


def test_a_configuration_is_checked_once(monkeypatch):
    check_packing("m", tiny_config("llama"))
    monkeypatch.setattr(packing_check, "Probe", None)
    check_packing("other", tiny_config("llama"))
    assert shared_prefix_obstacle(tiny_config("llama")) is None


@pytest.mark.parametrize("size", ["7B", "mixture"])
def test_the_copy_of_a_large_model_is_small(size):
    large = {"7B": AutoConfig.for_model("llama"), "mixture": AutoConfig.for_model("deepseek_v3")}
    probe = packing_check.Probe(large[size], trust_remote_code=False)
    placed = sum(p.numel() for p in probe.model.parameters() if not p.is_meta)
    assert placed < 10_000_000
    assert len(probe.model.model.layers) == {"7B": 1, "mixture": 4}[size]


def test_a_model_whose_forward_fails():
    config = CATALOGUE["deepseek_v2"].config()
    config.num_experts_per_tok = None
    with pytest.raises(ModelError, match=r"model 'm' .*its forward fails \(TypeError: topk"):
        check_packing("m", config)
