"""LoRA on the wide projections, whose branches may be dropped while an adapter wraps them, and prefix tuning."""

import json

import pytest
import torch
from model_cases import build, config_of, needs_fitting_peft, pair, source
from peft import LoraConfig, PeftModel, PrefixTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.checkpoint import load_translator
from hf_deepwide.loading import load_model

TARGETS = {
    "as usual": ["q_proj", "v_proj", "out_proj", "fc1"],
    "inputs only": ["q_proj", "k_proj", "v_proj"],
    "outputs only": ["out_proj", "fc2"],
    "everything": "all-linear",
}


WIDE = {
    "mat": ("mat-3", {"ffn_branches": 2}),
    "mat, un-joined": ("mat-3-unjoined", {}),
    "multipath": ("multipath-3-more", {}),
    "multipath without norms": ("multipath-3-more", {"path_norm": False}),
    "lstm": ("lstm-two", {}),
    "rk2 and DLCL": ("vanilla-rk2", {}),
    "deepnorm": ("vanilla-deepnorm", {}),
    "b2t": ("vanilla-b2t", {}),
    "attention": ("vanilla-attention-blocks", {}),
    "hyper": ("vanilla-hyper", {}),
    "mhc": ("vanilla-mhc", {}),
    "denseformer": ("vanilla-denseformer", {}),
    "weighted": ("vanilla-weighted", {}),
}


def wide(family="mat", **changes):
    case, fields = WIDE[family]
    return build(case, **fields, **changes)


def adapted(targets, family="mat", **changes):
    model = wide(family, **changes)
    torch.manual_seed(7)
    return get_peft_model(model, LoraConfig(r=2, target_modules=TARGETS[targets], init_lora_weights=False))


@pytest.mark.parametrize("family", WIDE)
@pytest.mark.parametrize("targets", TARGETS)
def test_merging_an_adapter_changes_nothing(targets, family):
    model = adapted(targets, family).eval()
    with torch.no_grad():
        with model.disable_adapter():
            base = model(**pair()).logits
        unmerged = model(**pair()).logits
        merged = model.merge_and_unload()(**pair()).logits
    assert (unmerged - base).abs().mean() > 0.05
    torch.testing.assert_close(merged, unmerged, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("granularity", ["batch", "sentence"])
@pytest.mark.parametrize("drop_unit", ["branch", "head", "chunk"])
@pytest.mark.parametrize("targets", TARGETS)
def test_an_adapted_model_drops_as_a_merged_one(targets, drop_unit, granularity):
    """An adapted model weighs dropped branches by 0, a merged model leaves them out. One seed gives equal losses."""
    options = {"drop_branch": 0.4, "drop_unit": drop_unit, "drop_granularity": granularity}
    options["join_ffn"] = drop_unit != "chunk"
    one, two = adapted(targets, **options).train(), adapted(targets, **options).merge_and_unload().train()
    losses = set()
    for seed in range(3):
        with torch.no_grad():
            torch.manual_seed(seed)
            unmerged = one(**pair()).loss
            torch.manual_seed(seed)
            torch.testing.assert_close(two(**pair()).loss, unmerged, rtol=1e-5, atol=1e-5)
        losses.add(unmerged.item())
    assert len(losses) == 3


@pytest.mark.parametrize("targets", TARGETS)
def test_training_an_adapter_changes_it_and_nothing_else(targets, tmp_path):
    model = adapted(targets, drop_branch=0.4).train()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    torch.manual_seed(0)
    for _ in range(3):
        loss = model(**pair(), skip_logits=True, label_smoothing=0.1).loss
        loss.backward()
        assert [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
        optimizer.step()
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    model.eval().save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(wide(), tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**pair()).logits, model(**pair()).logits)


@pytest.mark.parametrize(
    ("fields", "tied"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, False),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}, False),
        ({"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}, True),
    ],
    ids=["matrices", "rows", "rows of tied matrices"],
)
def test_a_translator_may_be_an_adapter_of_embeddings(fields, tied, tokenizer, tmp_path):
    """PEFT wraps the embeddings, and its wrapper lacks some attributes of an embedding."""
    ties = {"share_encoder_decoder_embeddings": tied, "tie_word_embeddings": tied}
    base = build("vanilla", vocab_size=len(tokenizer), **ties)
    base.save_pretrained(tmp_path / "base")
    base.name_or_path = str(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=2, init_lora_weights=False, **fields)).eval()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "adapter")
    translator, _ = load_translator(tmp_path / "adapter")
    with torch.no_grad():
        torch.testing.assert_close(translator(**pair()).logits, model(**pair()).logits)


def test_an_adapter_of_another_size_than_its_base_is_refused_by_its_shapes(tokenizer, tmp_path):
    """The base was resized for new tokens after it was saved, and then adapted."""
    base = build(
        "vanilla", vocab_size=len(tokenizer), share_encoder_decoder_embeddings=False, tie_word_embeddings=False
    )
    base.save_pretrained(tmp_path / "base")
    base.resize_token_embeddings(len(tokenizer) + 3)
    base.name_or_path = str(tmp_path / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    shapes = rf"lm_head\S* has the shape \[{len(tokenizer) + 3}, 16\] instead of \[{len(tokenizer)}, 16\]"
    with pytest.raises(UserError, match=rf"the adapter does not fit its base: {shapes}"):
        load_model(AutoModelForSeq2SeqLM, tmp_path / "adapter")


# Prefix tuning: keys and values of the decoder's self-attention are learnt

LAYERS = {"encoder_layers": 3, "decoder_layers": 3}
PREFIXED = {
    "vanilla": ("vanilla", {}),
    "mat": ("mat-3", {"ffn_branches": 2, "drop_branch": 0.3}),
    "multipath": ("multipath-3-more", {}),
    "latent": ("latent-both", {}),
    "latent, hard": ("latent-both", {"inference_selection": "hard"}),
    "lstm": ("lstm-two", {}),
}


def prefixed(family, **changes):
    """A model with a learned prefix of three tokens. Decoder and encoder differ in their number of heads."""
    case, fields = PREFIXED[family]
    model = build(case, **{**LAYERS, **fields, **changes})
    if family == "latent, hard":  # leave out the first layer, whose cache slot gives the length
        model.layer_selections["decoder"].layer_logits.data = torch.tensor([[-1.0, 1.0, 1.0]])
    model.generation_config.update(max_new_tokens=5, num_beams=2)
    torch.manual_seed(3)
    return get_peft_model(model, PrefixTuningConfig(task_type=TaskType.SEQ_2_SEQ_LM, num_virtual_tokens=3))


@pytest.mark.parametrize("family", PREFIXED)
def test_prefix_tuning_trains_saves_and_generates(family, tmp_path):
    needs_fitting_peft()
    model = prefixed(family).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0)
    torch.manual_seed(0)
    model(**pair()).loss.backward()
    optimizer.step()
    model.eval().save_pretrained(tmp_path)
    with torch.no_grad():
        base = model.get_base_model()(**pair()).logits
        logits = model(**pair()).logits
        assert (logits - base).abs().mean() > 0.01
        base_model = prefixed(family).get_base_model()
        again = PeftModel.from_pretrained(base_model, tmp_path).eval()
        assert torch.equal(again(**pair()).logits, logits)
        beams = model.generate(**source())
        assert beams.shape == (3, 6)
        greedy = model.generate(**source(), num_beams=1)
        scored = model(**source(), decoder_input_ids=greedy[:, :-1]).logits.argmax(-1)
    assert torch.equal(scored, greedy[:, 1:]), "token by token, behind the same prefix"


@pytest.mark.parametrize("family", PREFIXED)
def test_a_prefix_of_real_tokens_is_a_translation_that_has_begun(family):
    """The keys and values of three tokens, given as a prefix, leave the logits of later tokens as they are."""
    model = prefixed(family).eval()
    base, sentence, target = model.get_base_model(), source((6,)), torch.tensor([[2, 9, 7, 11, 5]])
    with torch.no_grad():
        expected = base(**sentence, decoder_input_ids=target).logits[:, 3:]
        begun = base(**sentence, decoder_input_ids=target[:, :3], use_cache=True).past_key_values
        slots = begun.self_attention_cache.layers
        config = model.active_peft_config
        heads, width = config.num_attention_heads, config.token_dim // config.num_attention_heads
        embedding = torch.zeros(3, 6, heads, width)
        for layer, slot in enumerate(slots):
            if slot.is_initialized and slot.keys.shape[1] == heads:  # False: the layer is left out
                row = 4 * layer % 6  # PEFT lays two copies of 6 rows end to end and gives each layer the next 4
                embedding[:, row : row + 2] = torch.stack([slot.keys[0], slot.values[0]]).permute(2, 0, 1, 3)
        model.prompt_encoder["default"].embedding.weight.copy_(embedding.flatten(1))
        got = model(**sentence, decoder_input_ids=target[:, 3:]).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_prefix_in_too_few_layers_is_refused_with_their_number():
    """PEFT makes a prefix for as many layers as the encoder has."""
    with pytest.raises(ValueError, match=r"2 layers.*PrefixTuningConfig\(num_layers=3\)"):
        prefixed("mat", encoder_layers=2)(**pair())


def test_the_shape_of_the_cache_is_told_and_not_saved(tmp_path):
    config = config_of("mat-3")
    fields = config.to_dict()
    assert (fields["num_key_value_heads"], fields["head_dim"]) == (12, 4)
    assert type(config)(**fields).to_dict() == fields
    config.save_pretrained(tmp_path)
    assert not {"num_key_value_heads", "head_dim"} & set(json.loads((tmp_path / "config.json").read_text()))


HOOKED = {"mat": "encoder.layers.0.self_attn.q_proj", "multipath": "encoder.layers.0.feed_forward.fc1"}


@pytest.mark.parametrize("family", HOOKED)
def test_hooks_of_a_projection_act_in_training(family):
    """Spectral norm computes the weight before each call; a hook that looks at activations is called."""
    model = wide(family).train()
    projection = model.model.get_submodule(HOOKED[family])
    torch.nn.utils.spectral_norm(projection)
    seen = []
    projection.register_forward_hook(lambda *_: seen.append(True))
    for _ in range(2):
        model(**pair()).loss.backward()
    assert projection.weight_orig.grad.abs().sum() > 0
    assert len(seen) == 2
