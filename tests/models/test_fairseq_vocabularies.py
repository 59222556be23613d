"""Dictionaries of fairseq become a tokenizer, and its tokens have the embeddings that fairseq would look up."""

import sys
from types import SimpleNamespace

import naive_fairseq
import pytest
import torch
from fairseq_files import NAIVE, SYMBOLS, TARGET_SYMBOLS, namespace, our_logits, random_weights, save
from transformers import pipeline

from hf_deepwide import from_fairseq
from hf_deepwide.errors import UserError
from hf_deepwide_cli import main

EXACT = {"rtol": 0, "atol": 1e-12}


@pytest.fixture
def dictionaries(tmp_path):
    """Codes, and dictionaries of both sides. Three symbols are only in the source's, and one only in the target's."""
    (tmp_path / "codes").write_text("#version: 0.2\nl o\nlo w</w>\nn e\nne w</w>\n", encoding="utf-8")
    source = ["l@@", "lo@@", "low", "new", "n@@", "e@@", "w", "s", "x"]
    target = ["low", "new", "lo@@", "w", "x", "y", "e@@"]
    for language, symbols in (("de", source), ("en", target)):
        lines = "".join(f"{symbol} 5\n" for symbol in symbols)
        (tmp_path / f"dict.{language}.txt").write_text(lines, encoding="utf-8")
    assert (len(source) + 4, len(target) + 4) == (SYMBOLS, TARGET_SYMBOLS)
    return tmp_path, ["<s>", "<pad>", "</s>", "<unk>", *source], ["<s>", "<pad>", "</s>", "<unk>", *target]


def test_one_dictionary_becomes_the_vocabulary_and_unknown_pieces_stay_unknown(dictionaries):
    folder, _, _ = dictionaries
    weights = random_weights()
    path = save(folder / "checkpoint.pt", namespace(), weights)
    model, tokenizer = from_fairseq(path, folder / "dict.de.txt", folder / "codes")
    assert len(tokenizer) == model.config.vocab_size == SYMBOLS + 2  # `o` and `ne` are in merges, and no symbols
    ids = tokenizer("low nes")["input_ids"]
    assert ids == [6, SYMBOLS + 1, 11, 2]
    golden = naive_fairseq.logits(weights, SimpleNamespace(**NAIVE), [6, 3, 11, 2], [2, 3, 6])
    logits = our_logits(model, ids, [2, SYMBOLS + 1, 6])
    torch.testing.assert_close(logits[:, :SYMBOLS], golden, **EXACT)
    torch.testing.assert_close(logits.log_softmax(-1)[:, :SYMBOLS], golden.log_softmax(-1), **EXACT)
    assert (model.model.encoder.embed_tokens.weight is model.lm_head.weight) is True


@pytest.mark.parametrize("shares", ["decoder", "none"])
def test_two_dictionaries_become_one_vocabulary(shares, dictionaries):
    folder, source, target = dictionaries
    weights = random_weights(shares=shares)
    arguments = namespace(share_all_embeddings=False, share_decoder_input_output_embed=shares == "decoder")
    path = save(folder / "checkpoint.pt", arguments, weights)
    files = [folder / "dict.de.txt", folder / "dict.en.txt"]
    model, tokenizer = from_fairseq(path, files, folder / "codes")
    words = ["low", "new", "x", "s", "w"]
    ids = tokenizer(" ".join(words))["input_ids"]
    assert ids == [source.index(word) for word in words] + [2]
    assert tokenizer.convert_tokens_to_ids("y</w>") == SYMBOLS
    previous = ["low", "x", "y", "s"]  # only the source has `s`, so fairseq reads the unknown token
    theirs = [2, *(target.index(word) if word in target else 3 for word in previous)]
    ours = [2, *tokenizer(" ".join(previous))["input_ids"][:-1]]
    golden = naive_fairseq.logits(weights, SimpleNamespace(**NAIVE), ids, theirs).log_softmax(-1)
    logits = our_logits(model, ids, ours).log_softmax(-1)
    pieces = [*target[:4], *("low</w>", "new</w>", "lo", "w</w>", "x</w>", "y</w>", "e")]
    places = tokenizer.convert_tokens_to_ids(pieces)
    torch.testing.assert_close(logits[:, places], golden, **EXACT)
    others = [i for i in range(len(tokenizer)) if i not in places]
    assert len(others) == 5
    assert logits[:, others].exp().sum() < 1e-30
    assert model.config.share_encoder_decoder_embeddings is False


def test_decoders_begin_with_the_token_of_their_language(dictionaries, caplog):
    folder, _, _ = dictionaries
    languages = ["cs", "de", "en"]
    weights = random_weights(pre_norm=True)
    rows = torch.randn(3, 8, dtype=torch.float64)
    table = torch.cat([weights["encoder.embed_tokens.weight"], rows])
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight"):
        weights[name] = table
    theirs = {f"models.{pair}.{name}": t for pair in ("en-de", "en-cs") for name, t in weights.items()}
    arguments = namespace(
        lang_pairs=["en-de", "en-cs"], decoder_langtok=True, encoder_normalize_before=True, source_lang=None,
        target_lang=None, decoder_normalize_before=True,
    )  # fmt: skip
    path = save(folder / "checkpoint.pt", arguments, theirs)
    model, tokenizer = from_fairseq(path, folder / "dict.de.txt", folder / "codes")
    starts = {language: SYMBOLS + i for i, language in enumerate(languages)}
    assert model.config.translation_pairs == {
        "en-de": {"decoder_start_token_id": starts["de"]},
        "en-cs": {"decoder_start_token_id": starts["cs"]},
    }
    assert from_fairseq(path).model.config.translation_pairs == model.config.translation_pairs, "without a tokenizer"
    model.save_pretrained(folder / "ours")
    tokenizer.save_pretrained(folder / "ours")
    for language in ("de", "cs"):
        translate = pipeline("translation", str(folder / "ours"), device="cpu", max_new_tokens=4, num_beams=1)
        ids = torch.tensor([tokenizer("low x")["input_ids"]])
        expected = model.generate(ids, decoder_start_token_id=starts[language], max_new_tokens=4, num_beams=1)
        text = translate("low x", src_lang="en", tgt_lang=language)[0]["translation_text"]
        assert text == tokenizer.decode(expected[0], skip_special_tokens=True)
    alone = {name: tensor for name, tensor in theirs.items() if name.startswith("models.en-cs.")}
    arguments.lang_pairs = "en-de,en-cs"
    one, _ = from_fairseq(save(folder / "one.pt", arguments, alone), folder / "dict.de.txt", folder / "codes")
    assert one.config.decoder_start_token_id == one.generation_config.decoder_start_token_id == starts["cs"]
    assert (one.config.source_lang, one.config.target_lang) == ("en", "cs")
    assert not hasattr(one.config, "translation_pairs")
    other = save(folder / "other.pt", namespace(encoder_langtok="tgt", lang_pairs="en-de"), random_weights())
    with pytest.raises(UserError, match="encoder_langtok"):
        from_fairseq(other, folder / "dict.de.txt")
    caplog.clear()
    from_fairseq(other)
    assert f"{SYMBOLS - 2} de, {SYMBOLS - 1} en" in caplog.text


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["dict.en.txt"], "has 11 symbols .* the checkpoint has 13 embeddings"),
        (["dict.de.txt", "dict.en.txt"], "dict.en.txt has 11 symbols"),
        (["dict.de.txt"] * 3, "3 dictionaries are given"),
        (["dict.de.txt", "other"], "the two dictionaries differ"),
    ],
)
def test_dictionaries_of_another_model_are_refused(files, message, dictionaries):
    folder, source, _ = dictionaries
    (folder / "other").write_text("".join(f"{symbol} 1\n" for symbol in source[:3:-1]), encoding="utf-8")
    path = save(folder / "checkpoint.pt", namespace(), random_weights())
    with pytest.raises(UserError, match=message):
        from_fairseq(path, [folder / file for file in files], folder / "codes")


def test_the_command_writes_a_folder_that_translates(dictionaries, monkeypatch, capsys):
    folder, _, _ = dictionaries
    path = save(folder / "checkpoint.pt", namespace(), {k: t.float() for k, t in random_weights().items()})
    words = ["convert", str(path), str(folder / "ours")]
    given = ["--dict", str(folder / "dict.de.txt"), "--codes", str(folder / "codes")]
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", *words, *given])
    main()
    assert "ours: vanilla_transformer" in capsys.readouterr().out
    translate = pipeline("translation", str(folder / "ours"), device="cpu")
    assert isinstance(translate("low new")[0]["translation_text"], str)
    assert translate.model.generation_config.num_beams == 5
    mistakes = [
        (words[1], [], "give the dictionary by --dict"),
        (words[1], ["--no_tokenizer", *given], "--dict makes a tokenizer and --no_tokenizer makes none"),
        (words[1], ["--no_tokenizer", "--codes", "x"], "--codes belongs to a tokenizer"),
        ("no.pt", [], "no.pt: there is no such file"),
    ]
    for checkpoint, mistake, message in mistakes:
        monkeypatch.setattr(sys, "argv", ["hf-deepwide", "convert", checkpoint, str(folder / "second"), *mistake])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert f"error: {message}" in capsys.readouterr().err
    assert not (folder / "second").exists()
