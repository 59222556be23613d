"""Generation: every mode that transformers offers offline, with every cache, agrees with the plain forward pass."""

import model_cases
import pytest
import torch
from model_cases import CASES, needs_transformers, pair, source, tokens
from transformers import DynamicCache, EncoderDecoderCache, StaticCache
from transformers.generation import CompileConfig
from transformers.generation.utils import GENERATION_MODES_MAPPING

NEW = 6
SOME = ["vanilla", "mat-3", "mat-2-prenorm", "latent-decoder-hard", "lstm-two", "vanilla-attention", "vanilla-hyper"]
SPREAD = {"no_repeat_ngram_size": 1}  # random tied models repeat themselves; every step must matter
CLOSE = {"atol": 2e-6, "rtol": 2e-6, "check_dtype": False}  # `generate` keeps logits in float32


def build(case, **changes):
    """A case's model in float64: in float32 some positions of it are badly conditioned."""
    return model_cases.build(case, **changes).double()


def generate(model, inputs=None, **options):
    """Generate `NEW` tokens after the start token, however probable the end is."""
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, **SPREAD, **options}
    return model.generate(**(source() if inputs is None else inputs), **options)


def needs_beams_of_two_vocabularies(case, beams):
    """Skip beam search with two vocabularies: Transformers 5.17 uses the source's vocabulary size, also for Marian."""
    if case == "mat-3-two-vocabularies" and beams > 1:
        needs_transformers("5.18", "beam search with two vocabularies")


def one(row=0):
    """A source batch of one sentence."""
    return {name: tensor[row : row + 1] for name, tensor in source().items()}


def test_these_are_all_the_modes_that_need_no_download():
    """The tests below cover them. The others run code from the Hub."""
    local = {mode.value for mode, method in GENERATION_MODES_MAPPING.items() if "/" not in method}
    assert local == {"greedy_search", "sample", "beam_search", "beam_sample", "assisted_generation"}


@pytest.mark.parametrize("case", CASES)
def test_greedy_search_takes_the_best_next_token_of_the_whole_prefix(case):
    """Against teacher forcing without a cache, token by token."""
    model = build(case)
    out = generate(model, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        whole = model(**source(), decoder_input_ids=out.sequences[:, :-1], use_cache=False).logits
    torch.testing.assert_close(torch.stack(out.logits, 1), whole, **CLOSE)
    assert len({tuple(row) for row in out.sequences.tolist()}) == 3  # the source matters
    for row, logits in zip(out.sequences.tolist(), whole, strict=True):
        for t in range(NEW):
            allowed = logits[t].clone()
            allowed[row[: t + 1]] = -torch.inf
            assert row[t + 1] == allowed.argmax()


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_every_cache_gives_the_same_tokens_and_logits(case, beams):
    needs_beams_of_two_vocabularies(case, beams)
    model = build(case)
    more = {"num_beams": beams, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    expected = generate(model, **more)
    for cache in ({"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}):
        got = generate(model, **more, **cache)
        assert torch.equal(got.sequences, expected.sequences), cache
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), **CLOSE)
        if beams > 1:
            torch.testing.assert_close(got.sequences_scores, expected.sequences_scores, **CLOSE)


@pytest.mark.parametrize("case", SOME)
def test_a_padded_beginning_is_continued_alike_with_every_cache(case):
    """Positions do not count padding, also with a static cache, for which `generate` makes a causal mask."""
    model = build(case)
    begun, mask = tokens((4, 4, 4), seed=5)
    mask[0, :2] = 0
    begun[0, :2] = model.config.pad_token_id
    more = {"decoder_input_ids": begun, "decoder_attention_mask": mask}
    more |= {"return_dict_in_generate": True, "output_logits": True}
    more["bad_words_ids"] = [[model.config.pad_token_id]]  # SPREAD forbids it only in the padded row
    expected = generate(model, **more)
    static = generate(model, **more, cache_implementation="static", disable_compile=True)
    assert torch.equal(static.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(static.logits), torch.stack(expected.logits), **CLOSE)
    alone = {**more, "decoder_input_ids": begun[:1, 2:], "decoder_attention_mask": mask[:1, 2:]}
    torch.testing.assert_close(
        torch.stack(generate(model, one(), **alone).logits), torch.stack(expected.logits)[:, :1], **CLOSE
    )


@pytest.mark.parametrize(
    "cache", [{}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}]
)
def test_a_translation_that_becomes_too_long_is_refused_with_every_cache(cache):
    model = build("vanilla")
    with pytest.raises(ValueError, match="lower `max_new_tokens` or `max_length`"):
        generate(model, **cache, max_new_tokens=60, min_new_tokens=60)


def test_a_config_may_ask_for_tuples():
    model, batch = build("vanilla"), pair()
    with torch.no_grad():
        expected = model(**batch)
        model.config.return_dict = False
        loss, logits = model(**batch)[:2]
    assert (loss, True) == (expected.loss, torch.equal(logits, expected.logits))


def test_a_cache_of_one_part_does_not_mix_source_and_target():
    model, (target, _) = build("vanilla", attn_implementation="sdpa"), tokens((5, 5, 5), seed=3)
    inputs = {"input_ids": tokens((6, 6, 6))[0]}
    with torch.no_grad():
        whole = model(**inputs, decoder_input_ids=target).logits
        cache = DynamicCache()
        parts = [
            model(**inputs, decoder_input_ids=target[:, start:end], past_key_values=cache).logits
            for start, end in ((0, 3), (3, 5))
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


@pytest.mark.parametrize("chunk", [1, 2, 5])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("case", SOME)
def test_decoding_in_chunks_of_any_size_is_teacher_forcing(case, kind, chunk):
    model = build(case)
    inputs, (target, mask) = source(), tokens((7, 7, 7), seed=3)
    config = model.config.get_text_config(decoder=True)
    cache = {
        "dynamic": lambda: EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config)),
        "static": lambda: EncoderDecoderCache(
            StaticCache(config=config, max_cache_len=9), StaticCache(config=config, max_cache_len=7)
        ),
    }[kind]()
    with torch.no_grad():
        whole = model(**inputs, decoder_input_ids=target).logits
        memory = model.get_encoder()(**inputs)
        parts = [
            model(
                encoder_outputs=memory,
                attention_mask=inputs["attention_mask"],
                decoder_input_ids=target[:, start : start + chunk],
                decoder_attention_mask=mask[:, : start + chunk],
                past_key_values=cache,
                use_cache=True,
            ).logits
            for start in range(0, 7, chunk)
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, **CLOSE)


@pytest.mark.parametrize(("beams", "side"), [(1, "left"), (2, "right")])  # enough: beams copy the encoder's output
@pytest.mark.parametrize("case", CASES)
def test_a_sentence_is_translated_alike_alone_and_in_a_padded_batch(case, beams, side):
    needs_beams_of_two_vocabularies(case, beams)
    model, inputs = build(case), source()
    lengths = inputs["attention_mask"].sum(1).tolist()
    if side == "left":
        order = inputs["attention_mask"].argsort(dim=1, stable=True)
        batch = {name: tensor.gather(1, order) for name, tensor in inputs.items()}
    else:
        batch = inputs
    more = {"num_beams": beams, "return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    together = generate(model, batch, **more)
    for row, length in enumerate(lengths):
        alone = generate(model, {"input_ids": inputs["input_ids"][row : row + 1, :length]}, **more)
        assert torch.equal(alone.sequences[0], together.sequences[row])
        rows = slice(row * beams, (row + 1) * beams)
        torch.testing.assert_close(
            torch.cat(alone.logits), torch.stack(together.logits)[:, rows].flatten(0, 1), **CLOSE
        )


@pytest.mark.parametrize("case", SOME)
def test_beam_search_scores_are_those_of_the_sentences_it_returns(case):
    """Scores are log-probabilities (from teacher forcing) over length^0.6. The sentences differ in length."""
    model = build(case)
    end = int(generate(model)[0, 3])  # a token that is likely, but not as the first one
    out = generate(
        model,
        num_beams=4,
        num_return_sequences=3,
        length_penalty=0.6,
        return_dict_in_generate=True,
        output_scores=True,
        no_repeat_ngram_size=0,
        eos_token_id=end,
        min_new_tokens=0,
    )
    target = out.sequences[:, 1:]
    ends = target == end
    after = ends.cumsum(1) - ends.long() > 0
    lengths = (~after).sum(1)
    assert len(set(lengths.tolist())) > 1
    repeated = {name: tensor.repeat_interleave(3, 0) for name, tensor in source().items()}
    with torch.no_grad():
        logits = model(**repeated, decoder_input_ids=out.sequences[:, :-1], use_cache=False).logits
    chosen = logits.log_softmax(-1).gather(2, target[..., None])[..., 0]
    expected = chosen.masked_fill(after, 0).sum(1) / lengths**0.6
    torch.testing.assert_close(out.sequences_scores, expected, **CLOSE)
    scores = out.sequences_scores.view(3, 3)
    assert (scores[:, :-1] >= scores[:, 1:]).all()
    for row in range(3):
        assert len({tuple(sentence) for sentence in out.sequences[3 * row : 3 * row + 3].tolist()}) == 3


@pytest.mark.parametrize("case", SOME)
def test_sampling_is_seeded_and_follows_the_distribution(case):
    model = build(case)
    options = {"do_sample": True, "num_return_sequences": 400, "max_new_tokens": 1, "min_new_tokens": 1, "top_k": 0}
    torch.manual_seed(0)
    first = generate(model, one(), **options)[:, 1]
    torch.manual_seed(0)
    assert torch.equal(first, generate(model, one(), **options)[:, 1])
    with torch.no_grad():
        p = model(**one(), decoder_input_ids=torch.tensor([[2]])).logits[0, 0]
    p[2] = -torch.inf  # SPREAD forbids the start token
    p = p.softmax(-1)
    counts = torch.bincount(first, minlength=len(p)) / 400
    assert (counts - p).abs().max() < 0.08
    torch.manual_seed(0)
    beam_sample = generate(model, one(), do_sample=True, num_beams=3, num_return_sequences=2)
    assert beam_sample.shape == (2, NEW + 1)


@pytest.mark.parametrize("helper", ["itself", "another", "prompt lookup"])
@pytest.mark.parametrize("case", SOME)
def test_assisted_generation_changes_nothing_but_the_speed(case, helper):
    if helper == "prompt lookup":
        needs_transformers("5.18", "prompt lookup of encoder-decoders")
    if case == "latent-decoder-hard" and helper != "itself":
        needs_transformers("5.22", "cutting back a cache in which skipped layers are empty")
    model = build(case)
    if helper == "prompt lookup":
        options = {"prompt_lookup_num_tokens": 2}
    else:
        assistant = model if helper == "itself" else build(case, seed=5)
        assistant.generation_config.num_assistant_tokens = 2
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        options = {"assistant_model": assistant}
    more = {"return_dict_in_generate": True, "output_scores": True, "no_repeat_ngram_size": 0}
    ending = {"eos_token_id": 2}  # prompt lookup requires an end; min_new_tokens prevents it
    expected = generate(model, one(), **more, **ending)
    got = generate(model, one(), **more, **ending, **options)
    assert torch.equal(got.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(got.scores), torch.stack(expected.scores), **CLOSE)


@pytest.mark.parametrize("case", SOME)
def test_constraints_and_prefixes_are_kept(case):
    model = build(case)
    free = generate(model)
    allowed = [5, 7, 9, 11, 13, 15, 17]
    for beams in (1, 3):
        out = generate(model, num_beams=beams, prefix_allowed_tokens_fn=lambda batch, ids: allowed)
        assert set(out[:, 1:].flatten().tolist()) <= set(allowed)
    forced = generate(model, forced_bos_token_id=30)
    assert (forced[:, 1] == 30).all()
    assert not torch.equal(forced[:, 2:], free[:, 2:])

    prefix = free[:, :3]
    continued = generate(
        model,
        {**source(), "decoder_input_ids": prefix},
        max_new_tokens=NEW - 2,
        min_new_tokens=NEW - 2,
    )
    assert torch.equal(continued, free)
    no_start = generate(
        model, {**source(), "decoder_input_ids": prefix[:, 1:]}, max_new_tokens=NEW - 2, min_new_tokens=NEW - 2
    )
    assert torch.equal(no_start, free)  # the start token is put before a prefix that lacks it


@pytest.mark.parametrize("case", SOME)
def test_generation_from_encoder_outputs_from_embeddings_and_from_nothing(case):
    model, inputs = build(case), source()
    expected = generate(model, num_beams=2)
    with torch.no_grad():
        memory = model.get_encoder()(**inputs)
        embeds = model.get_input_embeddings()(inputs["input_ids"])
    mask = {"attention_mask": inputs["attention_mask"]}
    assert torch.equal(generate(model, {"encoder_outputs": memory, **mask}, num_beams=2), expected)
    assert torch.equal(generate(model, {"inputs_embeds": embeds, **mask}, num_beams=2), expected)
    assert torch.equal(generate(model, {}), generate(model, {"input_ids": torch.tensor([[0]])}))


@pytest.mark.parametrize("case", SOME)
def test_generation_continues_from_the_cache_of_an_earlier_call(case):
    model = build(case)
    more = {"return_dict_in_generate": True, "output_logits": True}
    whole = generate(model, **more, max_new_tokens=5, min_new_tokens=5)
    first = generate(model, **more, max_new_tokens=3, min_new_tokens=3)
    inputs = {
        **source(),
        "decoder_input_ids": first.sequences,
        "decoder_attention_mask": torch.ones_like(first.sequences),  # `generate` requires it for every model
        "past_key_values": first.past_key_values,
    }
    second = generate(model, inputs, **more, max_new_tokens=2, min_new_tokens=2)
    assert torch.equal(second.sequences, whole.sequences)
    torch.testing.assert_close(torch.stack(second.logits), torch.stack(whole.logits[3:]), **CLOSE)
    for kind in ("self_attention_cache", "cross_attention_cache"):
        for got, expected in zip(
            getattr(second.past_key_values, kind).layers, getattr(whole.past_key_values, kind).layers, strict=True
        ):
            torch.testing.assert_close(got.keys, expected.keys, **CLOSE)
            torch.testing.assert_close(got.values, expected.values, **CLOSE)


@pytest.mark.parametrize(("beams", "use_cache"), [(1, False), (2, True)])
@pytest.mark.parametrize("case", CASES)
def test_shapes_of_what_generate_returns(case, beams, use_cache):
    """Hugging Face's own generation tests derive these shapes from the config. Attentions are means over branches."""
    needs_beams_of_two_vocabularies(case, beams)
    model = build(case, attn_implementation="eager")
    config = model.config
    decoder = config.get_text_config(decoder=True)
    flags = ("output_scores", "output_logits", "output_attentions", "output_hidden_states", "return_dict_in_generate")
    out = generate(model, num_beams=beams, use_cache=use_cache, **dict.fromkeys(flags, True))
    rows = 3 * beams
    assert out.sequences.shape == (3, NEW + 1)
    assert len(out.scores) == len(out.logits) == len(out.decoder_attentions) == len(out.decoder_hidden_states) == NEW
    assert {tensor.shape for tensor in (*out.scores, *out.logits)} == {(rows, decoder.vocab_size)}
    assert decoder.vocab_size == config.decoder_vocab_size

    assert [a.shape for a in out.encoder_attentions] == [(3, config.encoder_attention_heads, 7, 7)] * 2
    assert [h.shape for h in out.encoder_hidden_states] == [(3, 7, 16)] * 3
    heads = config.decoder_attention_heads
    for step in range(NEW):
        length = 1 if use_cache else step + 1
        assert [a.shape for a in out.decoder_attentions[step]] == [(rows, heads, length, step + 1)] * 3
        assert [a.shape for a in out.cross_attentions[step]] == [(rows, heads, length, 7)] * 3
        assert [h.shape for h in out.decoder_hidden_states[step]] == [(rows, length, 16)] * 4

    if not use_cache:
        assert out.past_key_values is None
        return
    # One slot per layer, with the heads of all branches (`num_key_value_heads` in the config). A cell of the Evolved
    # Transformer has more slots after these.
    is_luna = getattr(config, "layer_form", "") == "luna"  # it keeps two keys per head, and only the packed source
    kept = heads * (2 if is_luna else config.attention_branches)
    for asked in (decoder, decoder.get_text_config(decoder=True)):
        assert asked.num_hidden_layers == 3
        assert asked.num_key_value_heads == config.num_key_value_heads == kept
        assert asked.num_attention_heads == heads
    shape = (rows, kept, NEW, 16 // heads)
    own, cross = out.past_key_values.self_attention_cache, out.past_key_values.cross_attention_cache
    slots = own.layers[:3] if "evolved" in case else own.layers
    assert [layer.keys.shape for layer in slots] == [layer.values.shape for layer in slots] == [shape] * 3
    slots = cross.layers[:3] if "evolved" in case else cross.layers
    assert [layer.keys.shape for layer in slots] == [(*shape[:2], config.luna_length if is_luna else 7, shape[3])] * 3


@pytest.mark.parametrize("case", ["mat-3", "latent-decoder-hard", "lstm-two", "vanilla-attention", "vanilla-mhc"])
def test_generation_compiles_without_a_graph_break_or_a_recompilation(case):
    """The decoding step with a static cache, for two batches of one shape, as `generate` does on accelerators."""
    model = build(case)
    torch.compiler.reset()
    config = CompileConfig(fullgraph=True, dynamic=False, backend="eager")
    config._compile_all_devices = True
    batches = [source(), source(seed=9)]
    more = {"return_dict_in_generate": True, "output_logits": True}
    expected = [generate(model, batch, **more) for batch in batches]
    for batch, plain in zip(batches, expected, strict=True):
        with torch._dynamo.config.patch(error_on_recompile=True):
            got = generate(model, batch, **more, cache_implementation="static", compile_config=config)
        assert torch.equal(got.sequences, plain.sequences)
        torch.testing.assert_close(torch.stack(got.logits), torch.stack(plain.logits), **CLOSE)
    assert hasattr(model, "_compiled_call")


def test_dropping_is_off_in_generation_and_training_mode_is_not_needed():
    """A MAT with drop-branch in its config generates the same as a MAT without it."""
    model = build("mat-3", drop_branch=0.5)
    assert torch.equal(generate(model), generate(build("mat-3")))
    assert torch.equal(generate(model), generate(model))


def test_unknown_arguments_of_generate_are_refused():
    with pytest.raises(ValueError, match="num_beamz"):
        generate(build("vanilla"), num_beamz=2)
