"""`generate` gives the same with the decoder's twin as with the decoder, and uses the twin only where this holds."""

from contextlib import nullcontext
from types import MethodType

import model_cases
import pytest
import torch
from model_cases import WITH_TWIN, needs_transformers, source
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import EncoderDecoderCache

from hf_deepwide import VanillaTransformerForConditionalGeneration
from hf_deepwide.models import attention_step, decoding, matrix_product, modeling_base
from hf_deepwide.models.decoding import DecodingCache
from hf_deepwide.models.matrix_product import MatrixProduct

SEARCHES = {
    "greedy": {},
    "beams": {"num_beams": 5, "num_return_sequences": 2},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
}
DRAWN = ["vanilla", "mat-3", "multipath-2", "latent-both", "lstm"]  # a few: a twin does not depend on the search
NEW = 6
EXACT = {"atol": 1e-10, "rtol": 1e-10}


def build(case, **changes):
    return model_cases.build(case, **changes).double()


def one():
    return {name: tensor[1:2] for name, tensor in source().items()}


@pytest.fixture
def caches(monkeypatch):
    """The caches that twins have decoded with."""
    seen, logits = [], DecodingCache.logits

    def watch(cache, ids):
        if all(cache is not other for other in seen):
            seen.append(cache)
        return logits(cache, ids)

    monkeypatch.setattr(DecodingCache, "logits", watch)
    return seen


def generate(model, inputs=None, **options):
    torch.manual_seed(0)
    return model.generate(
        **(source() if inputs is None else inputs),
        **{
            "max_new_tokens": NEW,
            "min_new_tokens": NEW,
            "do_sample": False,
            "no_repeat_ngram_size": 1,  # random models repeat themselves; every step must matter
            "return_dict_in_generate": True,
            "output_scores": True,
            **options,
        },
    )


def assert_same(got, expected):
    """The same tokens, and the same scores up to the order of sums; `generate` keeps scores in float32."""
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.scores, expected.scores, strict=True):
        torch.testing.assert_close(a.double(), b.double(), atol=1e-6, rtol=1e-6)
    if "sequences_scores" in expected:
        torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("case", "search"),
    [(case, search) for case in WITH_TWIN for search in ("greedy", "beams")]
    + [(case, search) for case in DRAWN for search in ("samples", "sampled beams")],
)
def test_fast_decoder_generates_the_same_tokens(case, search, caches, monkeypatch):
    """For a batch of three sentences of different lengths, and for a single sentence."""
    options = SEARCHES[search]
    if case == "mat-3-two-vocabularies" and "num_beams" in options:
        needs_transformers("5.18", "beam search with two vocabularies")
    model = build(case)
    got = [generate(model, inputs, **options) for inputs in (source(), one())]
    assert len(caches) == 2
    monkeypatch.setattr(modeling_base, "can_decode", lambda *args: False)
    expected = [generate(model, inputs, **options) for inputs in (source(), one())]
    assert len(caches) == 2
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("many", [3, 4], ids=["many rows", "few rows"])
@pytest.mark.parametrize("case", ["vanilla", "mat-3", "latent-decoder-hard", "lstm"])
def test_hidden_states_of_steps_are_those_of_the_whole_prefix(case, many, monkeypatch):
    """In float64, over more tokens than a block of the cache holds, without the float32 logits of `generate`."""
    monkeypatch.setattr(decoding, "MANY", many)
    monkeypatch.setattr(attention_step, "BLOCK", 4)
    monkeypatch.setattr(attention_step, "SLOTS", 4)
    model, target = build(case), torch.randint(4, 37, (3, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        memory = model.get_encoder()(**source()).last_hidden_state
        whole = model(encoder_outputs=(memory,), attention_mask=source()["attention_mask"], decoder_input_ids=target)
        cache = DecodingCache(model, memory, source()["attention_mask"], 3, 1, {})
        steps = [cache.logits(ids) for ids in (target[:, :1], target[:, 1:4], *target[:, 4:].split(1, 1))]
    torch.testing.assert_close(torch.cat(steps, 1), whole.logits, **EXACT)
    assert cache.get_seq_length() == 20


@pytest.mark.parametrize("case", ["vanilla", "latent-both"])
def test_the_source_is_kept_once_for_all_beams(case, caches):
    """In the twin the keys of all beams stand together and never move. The returned cache has each beam's own past."""
    out = generate(build(case), num_beams=5)
    (cache,) = caches
    for layer in cache.decoder.layers:
        assert layer.encoder_attn.keys.mT.shape == layer.encoder_attn.values.shape == (3 * 4, 7, 4)
        assert layer.self_attn.keys.mT.shape == layer.self_attn.values.shape == (3 * 4, 32 * 5, 4)
    assert len(cache.memory) == 3
    assert type(out.past_key_values) is EncoderDecoderCache
    assert out.past_key_values.cross_attention_cache.layers[0].keys.shape == (15, 4, 7, 4)
    assert out.past_key_values.self_attention_cache.layers[0].keys.shape == (15, 4, NEW, 4)


@pytest.mark.parametrize("search", ["greedy", "beams", "samples"])
@pytest.mark.parametrize("case", ["mat-3", "lstm"])
def test_the_cache_that_is_returned_is_the_decoder_s_own(case, search, monkeypatch):
    """There are more tokens than a block holds. Each row has the keys of the beams that it came from."""
    monkeypatch.setattr(attention_step, "BLOCK", 4)
    monkeypatch.setattr(attention_step, "SLOTS", 4)
    model, options = build(case), SEARCHES[search] | {"max_new_tokens": 12, "min_new_tokens": 12}
    got = generate(model, **options)
    monkeypatch.setattr(modeling_base, "can_decode", lambda *args: False)
    expected = generate(model, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for part in ("self_attention_cache", "cross_attention_cache"):
        layers = [getattr(out.past_key_values, part).layers for out in (got, expected)]
        for a, b in zip(*layers, strict=True):
            assert a.is_initialized == b.is_initialized
            if a.is_initialized:
                torch.testing.assert_close((a.keys, a.values), (b.keys, b.values), **EXACT)
                assert not a.keys.is_inference()


def test_logits_can_be_changed_after_generation():
    """Nothing that `generate` returns is bound to inference mode, in which the steps are computed."""
    out = generate(build("vanilla"), output_logits=True)
    out.logits[0].add_(1)
    out.scores[0].requires_grad_()


def test_a_change_of_the_weights_is_seen(caches, monkeypatch):
    """Also a change through `.data`, which PyTorch does not count. Moving averages of weights make such changes."""
    model = build("vanilla")
    before = generate(model)
    for parameter in model.parameters():
        parameter.data.mul_(1.3)
    after = generate(model)
    assert not torch.equal(after.scores[0], before.scores[0])
    monkeypatch.setattr(modeling_base, "can_decode", lambda *args: False)
    assert_same(after, generate(model))


def hook(model):
    model.model.decoder.layers[0].self_attn.out_proj.register_forward_hook(lambda *args: None)


def train(model):
    model.model.decoder.layers[0].train()


def replace(model):
    model.model.decoder.layers[0].feed_forward.fc1.forward = model.model.decoder.layers[0].feed_forward.fc1.forward


def subclass(model):
    class Other(nn.Linear):
        """A projection class from outside PyTorch and this library."""

    fc1 = model.model.decoder.layers[1].feed_forward.fc1
    fc1.__class__ = Other


def factor_a_projection(model):
    """Replace the matrix of the queries by two matrices with the same product."""
    attention = model.model.decoder.layers[0].encoder_attn
    first = nn.Linear(attention.q_proj.in_features, attention.q_proj.in_features, bias=False).double()
    nn.init.eye_(first.weight)
    attention.q_proj = nn.Sequential(first, attention.q_proj).eval()


@pytest.mark.parametrize("change", [hook, train, replace, subclass, factor_a_projection])
def test_a_decoder_that_is_not_as_it_was_made_decodes_itself(change, caches):
    model = build("vanilla")
    expected = generate(model)
    assert len(caches) == 1
    change(model)
    assert_same(generate(model), expected)
    assert len(caches) == 1


def test_what_a_decoder_borrows_from_the_encoder_is_asked_for(caches, monkeypatch):
    """The LSTM that both stacks share belongs to the encoder."""
    model = build("lstm", share_hidden="global", decoder_ffn_dim=model_cases.SIZES["encoder_ffn_dim"])
    generate(model)
    assert len(caches) == 1
    model.model.encoder.lstm.hidden.fc1.register_forward_hook(lambda module, args, output: output * 0.5)
    got = generate(model)
    assert len(caches) == 1
    monkeypatch.setattr(modeling_base, "can_decode", lambda *args: False)
    assert_same(got, generate(model))


def test_an_lstm_that_both_stacks_share_has_fast_products(caches):
    generate(build("lstm", share_gates="global"))
    (cache,) = caches
    gates = cache.inputs["encoder_lstm"].gates
    assert {type(part) for part in gates._modules.values() if part is not None} >= {MatrixProduct}


def test_layers_that_latent_depth_leaves_out_are_not_prepared(caches):
    """Each call of `generate` would pack their weights."""
    model = build("latent-decoder-hard", decoder_layers=3)
    model.model.decoder.layer_selection.layer_logits.data = torch.tensor([[-1.0, 1.0, -1.0]], dtype=torch.float64)
    generate(model, num_beams=2)
    (cache,) = caches
    assert [layer.self_attn is None for layer in cache.decoder.layers] == [True, False, True]


class ReadsTheSource(VanillaTransformerForConditionalGeneration):
    """A model that adds a function of the encoder's output to the logits."""

    def forward(self, *args, encoder_outputs=None, **kwargs):
        output = super().forward(*args, encoder_outputs=encoder_outputs, **kwargs)
        output.logits = output.logits + encoder_outputs[0].mean((1, 2))[:, None, None] * torch.arange(
            output.logits.shape[-1]
        )
        return output


def test_a_subclass_with_its_own_forward_gets_all_inputs(caches, monkeypatch):
    model = build("vanilla")
    model.__class__ = ReadsTheSource
    got = generate(model)
    assert caches == []
    monkeypatch.setattr(modeling_base, "can_decode", lambda *args: False)
    assert_same(got, generate(model))


@pytest.mark.parametrize(
    "options",
    [
        {"output_attentions": True},
        {"output_hidden_states": True},
        {"use_cache": False},
        {"cache_implementation": "static", "disable_compile": True},
    ],
)
def test_uses_the_ordinary_decoder_for_other_options(options, caches):
    model = build("vanilla", attn_implementation="eager")
    assert_same(generate(model, **options), generate(model))
    assert len(caches) == 1, "recording hooks stay behind, and do not matter"


def test_low_rank_adapters_are_in_force(caches):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "fc2"], init_lora_weights=False, task_type="SEQ_2_SEQ_LM")
    base = build("mat-3")
    before = generate(base)
    adapted = peft.get_peft_model(base, config).eval()
    during = generate(adapted)
    assert len(caches) == 1
    merged = adapted.merge_and_unload()
    after = generate(merged)
    assert len(caches) == 2
    assert not torch.equal(during.scores[0], before.scores[0])
    assert_same(after, during)


def assert_near(ours, theirs):
    """Compare scores in half precision. Forbidden tokens have the score minus infinity in both."""
    assert torch.equal(ours.isfinite(), theirs.isfinite())
    assert (ours - theirs)[theirs.isfinite()].abs().max() < 0.2


@pytest.mark.parametrize("around", ["generate", "each call of the model"])
def test_fast_decoder_follows_autocast(around, caches, monkeypatch):
    """Autocast is around `generate`, or only around the model's forward, where Accelerate puts it for a Trainer."""
    model, autocast = model_cases.build("mat-3"), torch.autocast("cpu", dtype=torch.bfloat16)
    if around != "generate":
        model._original_forward, autocast = model.forward, nullcontext()
        model.forward = MethodType(torch.autocast("cpu", dtype=torch.bfloat16)(model.forward.__func__), model)
    with autocast:
        got = generate(model)
        monkeypatch.setattr(modeling_base, "can_decode", lambda *args: False)
        expected = generate(model)
    assert caches[0].decoder.layers[0].self_attn.keys.dtype == torch.bfloat16
    assert_near(got.scores[0], expected.scores[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_decodes_in_it(dtype, caches, monkeypatch):
    model = model_cases.build("mat-3").to(dtype)
    got = generate(model, num_beams=2)
    assert caches[0].decoder.layers[0].encoder_attn.keys.dtype == dtype
    monkeypatch.setattr(modeling_base, "can_decode", lambda *args: False)
    expected = generate(model, num_beams=2)
    assert_near(got.scores[0], expected.scores[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("large", [0, 1000])  # at 1000 the matrix is not large, and few rows read it ahead
@pytest.mark.parametrize("intel", [True, False])
def test_a_matrix_product_is_a_linear_layer(dtype, rows, bias, relu, large, intel, monkeypatch):
    """For each kind of copy of the weights, and also for fewer rows than the product was made for."""
    monkeypatch.setattr(matrix_product, "LARGE", large)
    monkeypatch.setattr(matrix_product, "AHEAD", 0)
    monkeypatch.setattr(matrix_product, "prefers_mkl", lambda: intel)
    linear = nn.Linear(24, 40, bias=bias, dtype=dtype)
    x = torch.randn(rows, 1, 24, dtype=dtype)
    with torch.no_grad():
        product = MatrixProduct(linear.weight, linear.bias, rows, relu=relu)
        for given in (x, x[: max(1, rows // 2)], x.expand(-1, 3, -1)):
            expected = linear(given).relu() if relu else linear(given)
            got = product(given)
            assert got.shape == (*given.shape[:2], 40)
            near = {"atol": 2e-3, "rtol": 0.016} if dtype == torch.bfloat16 else {}  # a sum near 0 is rounded twice
            torch.testing.assert_close(got, expected, **near)


@pytest.mark.parametrize(("intel", "rows", "columns", "is_read_ahead"), [
    (False, 1, 256, True), (False, 2, 256, True), (False, 1, 32, False), (False, 1, 8192, False), (True, 1, 256, False)
])  # fmt: skip
def test_few_rows_read_a_matrix_ahead_that_neither_a_cache_keeps_nor_a_copy(
    intel, rows, columns, is_read_ahead, monkeypatch
):
    monkeypatch.setattr(matrix_product, "prefers_mkl", lambda: intel)
    product = MatrixProduct(torch.randn(128, columns), None, rows)
    assert (product.ahead is not None) == is_read_ahead


# Joints of sub-layers


class Operations(TorchDispatchMode):
    """A count of the operations that PyTorch runs."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations_of_a_step(case, **changes):
    """How many operations the second token of two sentences takes."""
    model = model_cases.build(case, **changes)
    with torch.no_grad():
        cache = DecodingCache(model, torch.randn(2, 5, 16), None, 2, 1, {})
        cache.logits(torch.tensor([[2], [2]]))
        with Operations() as seen:
            cache.logits(torch.tensor([[5], [9]]))
    return seen.count


def test_a_layer_s_joints_take_equally_many_operations_at_any_depth():
    """Attention over depth reads all sources in one product, and not one by one."""
    counts = [operations_of_a_step("vanilla-attention", decoder_layers=layers) for layers in (2, 4, 6)]
    assert counts[2] - counts[1] == counts[1] - counts[0]


def test_sinkhorn_takes_few_operations():
    """Two operations for each normalisation of rows or columns. Sinkhorn is most of the work in a step of mHC."""
    counts = [operations_of_a_step("vanilla-mhc", sinkhorn_iterations=k, decoder_layers=1) for k in (4, 5)]
    assert counts[1] - counts[0] <= 3 * 2 * 2, "three joints, rows and columns"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("case", "fields"),
    [("vanilla-hyper", {}), ("vanilla-hyper", {"dynamic_streams": False}), ("vanilla-mhc", {})],
)
def test_a_step_of_streams_is_the_joint(case, fields, dtype):
    join = model_cases.build(case, **fields).to(dtype).model.decoder.layers[1].joins["encoder_attn"]
    streams = torch.randn(5, 1, join.streams, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    with torch.no_grad():
        expected, got = join(streams), join.decoding_step(False)(streams)
    tolerance = 1e-12 if dtype == torch.float64 else 0.05
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(*torch.broadcast_tensors(ours, theirs), rtol=tolerance, atol=tolerance)
    assert join.decoding_step(True) is join, "which turns autocast off for itself"
