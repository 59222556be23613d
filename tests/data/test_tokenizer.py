"""The joint BPE: ids, round trips, reproducibility, and that `AutoTokenizer` loads it without this package."""

import json
import os
from types import SimpleNamespace

import pytest
from datasets import Dataset

from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.data.tokenizer import (
    TokenizerArguments,
    check_tokenizer,
    load_or_train,
    train_tokenizer,
    training_texts,
)
from hf_deepwide.errors import UserError

ARGS = TokenizerArguments(vocab_size=600)
SAMPLE = ["Wie geht's ? 12 %"]


@pytest.fixture(scope="module")
def texts():
    return list(training_texts(build_phrases(train_size=600)["train"]))


@pytest.fixture(scope="module")
def tokenizer(texts):
    return train_tokenizer(texts, ARGS)


def test_special_tokens_and_sizes(tokenizer):
    assert len(tokenizer) == 600
    assert tokenizer.convert_ids_to_tokens(range(4)) == ["<s>", "<pad>", "</s>", "<unk>"]
    ids = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert ids == (0, 1, 2, 3)


def test_both_sides_end_with_eos_and_decode_to_the_text(tokenizer, texts):
    encoded = tokenizer(texts[0], text_target=texts[1])
    for side, text in (("input_ids", texts[0]), ("labels", texts[1])):
        assert encoded[side][-1] == 2
        assert encoded[side].count(2) == 1
        assert tokenizer.decode(encoded[side], skip_special_tokens=True) == text


def test_characters_never_seen_become_one_unknown(tokenizer):
    assert tokenizer("Ж日本")["input_ids"].count(3) == 1


def test_normalization(texts):
    odd = "ﬁve １２ cafe\u0301"
    words = [*texts, "five 12 café ﬁ１２\u0301 caFÉ"] * 2
    nfkc = train_tokenizer(words, ARGS)
    assert nfkc.decode(nfkc(odd)["input_ids"], skip_special_tokens=True) == "five 12 café"
    nfc = train_tokenizer(words, TokenizerArguments(vocab_size=600, normalization="nfc"))
    assert nfc.decode(nfc(odd)["input_ids"], skip_special_tokens=True) == "ﬁve １２ café"
    plain = train_tokenizer(words, TokenizerArguments(vocab_size=600, normalization="none"))
    assert plain.decode(plain(odd)["input_ids"], skip_special_tokens=True) == odd
    lower = train_tokenizer(words, TokenizerArguments(vocab_size=600, lowercase=True))
    assert lower.decode(lower("ﬁVE CAFÉ")["input_ids"], skip_special_tokens=True) == "five café"
    assert not any(character.isupper() for token in list(lower.get_vocab()) for character in token)


def test_split_digits(texts):
    tokenizer = train_tokenizer(texts, TokenizerArguments(vocab_size=600, split_digits=True))
    assert all(sum(map(str.isdigit, token)) < 2 for token in tokenizer.get_vocab())
    text = "Am 31. Mai 2031 um 14:30 Uhr, 1.234,50 €"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


@pytest.fixture(scope="module")
def another_process(tokenizer, texts, run_code, tmp_path_factory):
    """The results of a saved tokenizer in another process without this package, and a tokenizer trained there."""
    folder = tmp_path_factory.mktemp("saved")
    tokenizer.save_pretrained(folder)
    code = """if True:
        import json, sys
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
        ids = tokenizer(json.loads(sys.argv[2]))["input_ids"]
        assert not any(name.startswith("hf_deepwide") for name in sys.modules)
        decoded = tokenizer.batch_decode(ids, skip_special_tokens=True)
        from hf_deepwide.data.phrases import build_phrases
        from hf_deepwide.data.tokenizer import *
        texts = training_texts(build_phrases(train_size=600)["train"])
        trained = train_tokenizer(texts, TokenizerArguments(vocab_size=600)).backend_tokenizer.to_str()
        print(json.dumps([ids, decoded, tokenizer.pad_token_id, trained]))
        """
    ran = run_code(
        code, folder, json.dumps([*SAMPLE, *texts[:50]]), environment={**os.environ, "RAYON_NUM_THREADS": "1"}
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


def test_another_process_trains_the_same_tokenizer(tokenizer, another_process):
    """Phrases and merges depend on nothing but the seed: neither on hash order nor on the number of threads."""
    assert json.loads(another_process[3]) == json.loads(tokenizer.backend_tokenizer.to_str())


def test_auto_tokenizer_loads_it_without_this_package(tokenizer, texts, another_process):
    ids, decoded, pad, _ = another_process
    assert ids == tokenizer([*SAMPLE, *texts[:50]])["input_ids"]
    assert decoded[1:] == texts[:50]
    assert pad == 1


def test_load_or_train(tokenizer, texts, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_or_train(TokenizerArguments(path=str(tmp_path)), texts=iter(()))  # needs no text
    assert loaded.get_vocab() == tokenizer.get_vocab()
    assert load_or_train(ARGS, texts).get_vocab() == tokenizer.get_vocab()
    with pytest.raises(UserError, match="no tokenizer could be loaded"):
        load_or_train(TokenizerArguments(path=str(tmp_path / "nothing")), texts)


def test_loaded_tokenizer_without_padding_is_refused(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["pad_token"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="no pad_token"):
        load_or_train(TokenizerArguments(path=str(tmp_path)), [])


def test_training_mistakes_and_small_corpora(texts, caplog):
    with pytest.raises(UserError, match="no text"):
        train_tokenizer([], ARGS)
    with pytest.raises(UserError, match=r"vocab_size is 20, but .* distinct characters"):
        train_tokenizer(texts, TokenizerArguments(vocab_size=20))
    with caplog.at_level("INFO"):
        small = train_tokenizer(["aa bb", "aa"], TokenizerArguments(vocab_size=100))
    assert f"only {len(small)} of the 100 entries" in caplog.text
    with pytest.raises(UserError, match="vocab_size is 4"):
        TokenizerArguments(vocab_size=4)
    with pytest.raises(UserError, match="normalization is 'NFD'"):
        TokenizerArguments(normalization="NFD")


def test_training_texts_are_both_sides_up_to_a_limit():
    dataset = Dataset.from_dict({"source": ["a", "b", "c"], "target": ["x", "y", "z"]})
    assert list(training_texts(dataset)) == ["a", "x", "b", "y", "c", "z"]
    assert list(training_texts(dataset.to_iterable_dataset(), limit=2)) == ["a", "x", "b", "y"]
    assert list(training_texts(dataset, limit=3)) == ["a", "x", "b", "y", "c", "z"]


def test_training_texts_of_a_large_corpus_are_of_all_its_parts():
    numbers = [str(number) for number in range(1000)]
    dataset = Dataset.from_dict({"source": numbers, "target": [f"-{number}" for number in numbers]})
    texts = list(training_texts(dataset, limit=100))
    assert texts == list(training_texts(dataset, limit=100))
    sources, targets = texts[::2], texts[1::2]
    assert targets == [f"-{source}" for source in sources]
    assert len(set(sources)) == 100
    assert {int(source) // 100 for source in sources} == set(range(10))


def config(**fields):
    fitting = {
        "is_encoder_decoder": True,
        "vocab_size": 600,
        "pad_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 2,
    }
    return SimpleNamespace(**{**fitting, **fields})


@pytest.mark.parametrize("fields", [{}, {"vocab_size": 640}, {"decoder_vocab_size": None}, {"eos_token_id": [2, 3]}])
def test_fitting_model(tokenizer, fields):
    check_tokenizer(tokenizer, config(**fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"vocab_size": 599}, ["has 600 entries but the model's vocab_size is 599"]),
        ({"decoder_vocab_size": 10, "decoder_start_token_id": 2}, ["decoder_vocab_size is 10"]),
        ({"pad_token_id": 0, "eos_token_id": 3}, ["pad_token_id is 1 in", "eos_token_id is 2 in"]),
        ({"decoder_start_token_id": None}, ["no decoder_start_token_id", "generation_config.json"]),
        ({"decoder_start_token_id": 600}, ["decoder_start_token_id is 600; it must be an id below 600"]),
    ],
)
def test_model_that_does_not_fit(tokenizer, fields, expected):
    with pytest.raises(UserError) as error:
        check_tokenizer(tokenizer, config(**fields))
    assert all(part in str(error.value) for part in expected)
