"""Usual bases, fine-tuned by a recipe: BART, Marian, and Marian with two vocabularies."""

import json

import pytest
import torch
from coded_languages import KINDS
from coded_languages import SIZES as CODED_SIZES
from datasets import Dataset
from safetensors.torch import load_file, save_file
from sentence_pieces import train_pieces, write_vocabulary
from tiny_run import tiny_values
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BartTokenizer,
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    pipeline,
)

from hf_deepwide.data.arguments import DataArguments
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.data.encoding import encode
from hf_deepwide.data.tokenizer import check_tokenizer
from hf_deepwide.errors import UserError
from hf_deepwide.families import FAMILIES
from hf_deepwide.loading import load_model
from hf_deepwide.models.language_pairs import Languages
from hf_deepwide.models.plain_text import TextEncoder, encode_sources
from hf_deepwide.runs.recipe import check_recipe, load_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.runs.translation import Translation
from hf_deepwide.warm_start import logit_difference

SIZES = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
SOURCES = ["a b c d", "dab cab", "b a d", "cab dab a b"]
TARGETS = ["x y z w", "way xyz", "y w x", "zyx way x y"]


def pieces(folder, name, lines, tags=()):
    """A sentencepiece model of some lines, and its pieces with Marian's ids; `<pad>` is the last piece."""
    model, words = train_pieces(folder, lines * 4, 13, name)
    return model, write_vocabulary(folder / f"{name}.json", ["</s>", "<unk>", *tags, *words, "<pad>"])


def marian(folder, separate, tags=()):
    source, vocabulary = pieces(folder, "source", SOURCES if separate else SOURCES + TARGETS, tags)
    target, target_vocabulary = pieces(folder, "target", TARGETS) if separate else (source, None)
    more = {"target_vocab_file": target_vocabulary, "separate_vocabs": True} if separate else {}
    tokenizer = MarianTokenizer(source, target, vocabulary, **more)
    pad = tokenizer.pad_token_id
    fields = {"share_encoder_decoder_embeddings": not separate, "decoder_vocab_size": len(tokenizer)}
    config = MarianConfig(
        **SIZES, **fields, vocab_size=len(tokenizer), pad_token_id=pad, eos_token_id=0, bos_token_id=0,
        decoder_start_token_id=pad, forced_eos_token_id=0, scale_embedding=True, activation_function="relu",
    )  # fmt: skip
    return MarianMTModel(config), tokenizer


def bart(folder):
    letters = ["Ġ", *(f"Ġ{letter}" for letter in "abcdwxyz"), *"abcdwxyz"]
    vocabulary = {token: i for i, token in enumerate(["<s>", "<pad>", "</s>", "<unk>", *letters, "<mask>"])}
    merges = [("Ġ", letter) for letter in "abcdwxyz"]
    tokenizer = BartTokenizer(vocab=vocabulary, merges=merges)
    config = BartConfig(**SIZES, vocab_size=len(tokenizer), forced_bos_token_id=0)
    return BartForConditionalGeneration(config), tokenizer


TAGS = (">>deu<<", ">>fra<<")
BASES = {"bart": bart, "marian": lambda f: marian(f, False), "marian separate": lambda f: marian(f, True)}


@pytest.fixture(params=BASES)
def base(request, tmp_path):
    """A base in its folder, with a corpus beside it. Marian's file has an unused matrix, as in opus-mt-tc-big."""
    torch.manual_seed(1)
    folder = tmp_path / "base"
    folder.mkdir()
    model, tokenizer = BASES[request.param](folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if request.param.startswith("marian"):
        weights = load_file(folder / "model.safetensors")
        shared = "model.shared.weight" if "model.shared.weight" in weights else "model.decoder.embed_tokens.weight"
        save_file(weights | {"lm_head.weight": weights[shared] + 1}, folder / "model.safetensors", {"format": "pt"})
    rows = [{"x": source, "y": target} for source, target in zip(SOURCES * 4, TARGETS * 4, strict=True)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return request.param, folder


@pytest.mark.parametrize("converted", [False, True], ids=["its own family", "mat"])
def test_a_recipe_fine_tunes_a_base(base, converted, tmp_path):
    name, folder = base
    family = "mat" if converted else name.split()[0]
    if converted:
        theirs = load_model(AutoModelForSeq2SeqLM, folder)
        difference, largest = logit_difference(theirs, FAMILIES["mat"].lm.from_base(folder, attention_branches=2))
        assert difference < 1e-5 < 0.3 < largest
    values = tiny_values(tmp_path / "run", max_steps=2, warmup_steps=1, eval_steps=2, save_steps=2, max_tokens=64)
    values["model"] = {"family": family, "init_from": str(folder)}
    values["tokenizer"] = {"path": str(folder)}
    values["data"] = {
        "format": "jsonl", "root": str(tmp_path), **dict.fromkeys(("train", "validation", "test"), "rows.jsonl"),
        "source_field": "x", "target_field": "y", "max_length": 32,
    }  # fmt: skip
    recipe = check_recipe(values, "tuned", "tuned.yaml")
    results = run_recipe(recipe)
    assert results["test"]["sentences"] == 16

    run = tmp_path / "run"
    tokenizer, model = AutoTokenizer.from_pretrained(run), AutoModelForSeq2SeqLM.from_pretrained(run)
    assert model.config.model_type == family
    before = AutoTokenizer.from_pretrained(folder)
    for row, (source, target) in zip(
        encode(load_parallel(recipe.data, "test"), tokenizer, recipe.data, filter=False),
        zip(SOURCES * 4, TARGETS * 4, strict=True),
        strict=True,
    ):
        theirs = before(source, text_target=target)
        assert (row["input_ids"], row["labels"]) == (theirs["input_ids"], theirs["labels"])
        assert tokenizer.unk_token_id not in row["labels"]
        assert tokenizer.decode(row["labels"], skip_special_tokens=True) == target
    translate = pipeline("translation", str(run), device="cpu", max_new_tokens=4, max_length=None)
    assert isinstance(translate("a b")[0]["translation_text"], str)


PACKAGED = {  # recipe: the base, and the keys that are shortened here
    "finetune_nllb": ("nllb", {"data.pairs": "[eng_Latn-deu_Latn, eng_Latn-gsw_Latn]"}),
    "finetune_mbart": ("mbart50", {}),
}


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_recipe_fine_tunes_a_base(name, tmp_path):
    kind, shorter = PACKAGED[name]
    make, model_class, config_class, *_ = KINDS[kind]
    base = tmp_path / "base"
    base.mkdir()
    tokenizer = make(base)
    ids = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    model_class(config_class(**CODED_SIZES, **ids, vocab_size=len(tokenizer))).save_pretrained(base)
    tokenizer.save_pretrained(base)
    keys = {
        "model.init_from": base, "tokenizer.path": base, "data.root": tmp_path, "data.max_length": 32,
        "training.output_dir": tmp_path / "run", "training.max_steps": 2, "training.warmup_steps": 1,
        "training.gradient_accumulation_steps": 1, "training.eval_strategy": "steps", "training.eval_steps": 2,
        "training.save_strategy": "steps", "training.save_steps": 2, "evaluation.num_beams": 1,
        "evaluation.max_length_factor": 0, "evaluation.max_length_offset": 6, **shorter,
    }  # fmt: skip
    recipe = load_recipe(name, [word for key, value in keys.items() for word in (f"--{key}", str(value))])
    for pair in recipe.data.pairs or ["-".join(recipe.data.language_pairs[0])]:
        folder = tmp_path / "corpus" / (pair if recipe.data.pairs else "")
        folder.mkdir(parents=True, exist_ok=True)
        for split in ("train", "val", "test"):
            for language, lines in zip(pair.split("-"), (SOURCES, SOURCES[::-1]), strict=True):
                (folder / f"{split}.{language}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    results = run_recipe(recipe)
    scores = results["test"].get("pairs", {"one": results["test"]})
    assert {score["sentences"] for score in scores.values()} == {len(SOURCES)}
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run").config.model_type == recipe.family


def test_a_target_vocabulary_of_its_own_is_compared_with_the_decoders(tmp_path):
    model, tokenizer = marian(tmp_path, separate=True)
    tokenizer.encoder["q"] = len(tokenizer)
    model.config.vocab_size = len(tokenizer.encoder)
    check_tokenizer(tokenizer, model.config)
    model.config.decoder_vocab_size = 12
    model.config.decoder_start_token_id = 0
    with pytest.raises(UserError, match=r"has 13 entries .*decoder_vocab_size is 12; pad_token_id is 12, "):
        check_tokenizer(tokenizer, model.config)


@pytest.mark.parametrize("tags", [(), TAGS])
def test_targets_are_cut_by_their_own_vocabulary(tags, tmp_path):
    """A piece of the target vocabulary may have the id of a tag or of the padding in the source vocabulary."""
    _, tokenizer = marian(tmp_path, True, tags)
    own = {tokenizer.encoder[token] for token in ("<pad>", *tags)}
    expected = tokenizer(text_target=TARGETS)["input_ids"]
    assert any(own & {*row} for row in expected) is bool(tags)
    encoder = TextEncoder(tokenizer, target=True)
    assert encoder(TARGETS) == expected
    dataset = Dataset.from_dict({"source": SOURCES, "target": TARGETS})
    assert encode(dataset, tokenizer, DataArguments(), filter=False)["labels"][:] == expected
    assert encoder.never == {0, 12}  # the end-of-sentence token and the padding
    spelt = encoder._spelt([5, 12, 6])  # a text that has a control token among its pieces
    letters = [tokenizer.target_encoder.get(letter, 1) for letter in "<pad>"]
    assert spelt == [5, *letters, 6]


MARKS = {
    "tag": ({"source_lang": "eng", "target_lang": "deu", "source_field": "x", "target_field": "y"}, {}),
    "prefix": (
        {"source_lang": "en", "target_lang": "de", "source_field": "x", "target_field": "y"},
        {"task_specific_params": {"translation_en_to_de": {"prefix": "cab: "}}},
    ),
    "tags of pairs": ({"pairs": ["eng-deu", "eng-fra"]}, {}),
}


@pytest.mark.parametrize("mark", MARKS)
def test_training_marks_sources_as_translating_does(mark, tmp_path):
    """The marks: Marian's tags, T5's prefix, and the tokenizer's existing tags for the targets of several pairs."""
    base, (languages, fields) = tmp_path / "base", MARKS[mark]
    base.mkdir()
    model, tokenizer = marian(base, False, () if mark == "prefix" else TAGS)
    model.config.update(fields)
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    row = {"x": SOURCES[0], "y": TARGETS[0], "eng": SOURCES[0], "deu": TARGETS[0], "fra": TARGETS[1]}
    (tmp_path / "rows.jsonl").write_text((json.dumps(row) + "\n") * 4, encoding="utf-8")
    values = tiny_values(tmp_path / "run", max_steps=2, warmup_steps=1, eval_steps=2, save_steps=2, max_tokens=64)
    values["model"] = {"family": "marian", "init_from": str(base)}
    values["tokenizer"] = {"path": str(base)}
    values["data"] = {"format": "jsonl", "root": str(tmp_path), "max_length": 32, **languages}
    values["data"] |= dict.fromkeys(("train", "validation"), "rows.jsonl")
    recipe = check_recipe(values, "tuned", "tuned.yaml")
    task = Translation(recipe)
    args = recipe.training_arguments()
    texts = task.read(args, ended=False)
    ours = task.new_tokenizer(texts)
    assert len(ours) == len(tokenizer)
    model = task.new_model(ours, args)
    encoded = task.encode(texts, ours, model)
    known = Languages(model.config, model.generation_config, ours)
    pairs = [pair.split("-") for pair in languages.get("pairs", ())] or [(None, None)]  # the direction of the base
    choices = [known.choose(*pair) for pair in pairs]
    for split in ("train", "validation"):
        for choice, text, ids in zip(
            [choices[i] for i in encoded[split]["pair"]] if len(pairs) > 1 else choices * 4,
            texts[split]["source"],
            encoded[split]["input_ids"],
            strict=True,
        ):
            (source,) = encode_sources(known, choice, [text], 32)
            assert ids == source.ids
            assert len(ids) > len(ours(text)["input_ids"])  # with a mark
    values["data"] |= {"source_lang": "eng", "target_lang": "spa"} if mark == "tag" else {}
    if mark == "tag":
        recipe = check_recipe(values, "tuned", "tuned.yaml")
        with pytest.raises(UserError, match="unknown target language 'spa'"):
            Translation(recipe).encode(texts, ours, model)
