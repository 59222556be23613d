"""Wrong recipes, corpora and tokenizers: the messages of `train_translation.py` and `train_masked_lm.py`."""

import gzip
import json

import pytest
from mistakes import spoilt

TRAIN, MASKED = ("train_translation.py", "recipe.yaml"), ("train_masked_lm.py", "masked.yaml")
TOKENIZER = "--tokenizer.path=tokenizer"


def check(case, workspace, tmp_path, capsys, monkeypatch, call=TRAIN):
    monkeypatch.chdir(tmp_path)  # restores the working directory afterwards
    monkeypatch.delenv("HF_DEEPWIDE_DATA", raising=False)
    spoil, arguments, words = case
    place = spoilt(spoil, workspace, tmp_path, capsys)
    script, *first = call
    said = place.error_of(script, *first, *arguments)
    for word in words:
        assert word in said
    assert not (place.folder / "FIRED").exists()
    return place


# The recipe itself: (how the file is spoilt, the script's argument, words of the message)

NO_RECIPE = {
    "there is none": (None, ["nowhere.yaml"], ["there is no recipe nowhere.yaml"]),
    "a slip in its name": (
        lambda at: at.put("mine.yaml", ""),
        ["mien.yaml"],
        ["mien.yaml; did you mean 'mine.yaml'?"],
    ),
    "a name without its ending": (lambda at: at.put("mine.yaml", ""), ["mine"], ["did you mean 'mine.yaml'?"]),
    "extends a packaged recipe": (
        lambda at: at.put("r.yaml", "extends: multi30k_en_de_mat"),
        ["r.yaml"],
        ["r.yaml: extends: there is no file", "copy it: hf-deepwide recipes multi30k_en_de_mat --copy ."],
    ),
    "a slip in the family's key": (
        lambda at: at.put("r.yaml", "model: {familly: mat}"),
        ["r.yaml"],
        ["unknown key 'familly'", "nearest is 'family'"],
    ),
    "a folder": (None, ["corpus"], ["corpus is a folder; a recipe is a file"]),
    "a picture": (
        lambda at: at.put("r.yaml", b"\x89PNG\xff"),
        ["r.yaml"],
        ["r.yaml is no recipe: byte 1"],
    ),
    "a zero byte": (lambda at: at.put("r.yaml", "model: \0"), ["r.yaml"], ["r.yaml: not YAML", "#x0000"]),
    "empty": (lambda at: at.put("r.yaml", ""), ["r.yaml"], ["r.yaml: model.family", "vanilla_transformer"]),
    "a list": (lambda at: at.put("r.yaml", "- model"), ["r.yaml"], ["a recipe is a mapping of the sections"]),
    "two documents": (lambda at: at.put("r.yaml", "a: 1\n---\nb: 1\n"), ["r.yaml"], ["r.yaml, line 2", "document"]),
    "code in YAML": (
        lambda at: at.put("r.yaml", "model: !!python/object/apply:os.system [touch FIRED]"),
        ["r.yaml"],
        ["r.yaml, line 1", "python/object/apply:os.system"],
    ),
    "a list as key": (
        lambda at: at.put("r.yaml", "model: {[a]: b}"),
        ["r.yaml"],
        ["line 1: the key ['a'] is no text"],
    ),
    "contains itself": (
        lambda at: at.put("r.yaml", "model: &a {family: *a}"),
        ["r.yaml"],
        ["a value contains itself"],
    ),
}


@pytest.mark.parametrize("name", NO_RECIPE)
def test_no_recipe(name, workspace, tmp_path, capsys, monkeypatch):
    check(NO_RECIPE[name], workspace, tmp_path, capsys, monkeypatch, (TRAIN[0],))


# Values of keys: the argument, words of the message

VALUES = {
    "--training.learning_rate=-1": ["training: learning_rate is -1; accepted: 0 or more"],
    "--training.learning_rate=.nan": ["learning_rate is nan; accepted: 0 or more"],
    "--training.learning_rate=1e400": ["learning_rate is inf"],
    "--training.adam_beta2=1.5": ["adam_beta2 is 1.5; accepted: 0 or more, and less than 1"],
    "--training.adam_epsilon=0": ["adam_epsilon is 0; accepted: more than 0"],
    "--training.weight_decay=-1": ["weight_decay is -1"],
    "--training.label_smoothing_factor=2": ["label_smoothing_factor is 2"],
    "--training.warmup_steps=-5": ["warmup_steps is -5; accepted: 0 or more"],
    "--training.gradient_accumulation_steps=0": ["gradient_accumulation_steps is 0; accepted: 1 or more"],
    "--training.num_train_epochs=0": ["num_train_epochs is 0; accepted: more than 0"],
    "--training.max_steps=0": ["max_steps is 0; accepted: 1 or more, or -1"],
    "--training.max_steps=many": ["training.max_steps: 'many' is not accepted; give a whole number"],
    "--evaluation.metrics=bleu": ["evaluation.metrics: 'bleu' is not accepted; give a list, such as [bleu]"],
    "--training.seed=-1": ["seed is -1; accepted: 0 or more"],
    "--training.seed=99999999999999999999": ["seed is 99999999999999999999"],
    "--training.logging_steps=-3": ["logging_steps is -3"],
    "--training.save_steps=0": ["save_steps is 0"],
    "--training.save_total_limit=0": ["save_total_limit is 0"],
    "--training.max_grad_norm=-1": ["max_grad_norm is -1"],
    "--training.dataloader_num_workers=-1": ["dataloader_num_workers is -1"],
    "--training.generation_num_beams=0": ["generation_num_beams is 0"],
    "--training.lr_scheduler_type=foo": ["foo is not a valid SchedulerType", "inverse_sqrt"],
    "--training.lr_scheduler_kwargs={foo: 1}": ["lr_scheduler_kwargs {'foo': 1}", "unexpected keyword"],
    "--training.optim=foo": ["foo is not a valid OptimizerNames", "adamw_torch"],
    "--training.optim_args=foo": ["optim_args 'foo'"],
    "--training.fp16=true": ["fp16 needs a GPU"],
    "--training.bf16=maybe": ["bf16 is 'maybe'; accepted: true, false, auto"],
    "--training.attn_implementation=foo": ["attn_implementation is 'foo'; accepted: auto, eager, sdpa"],
    "--training.report_to=foo": ["report_to is 'foo'; accepted: none"],
    "--training.torch_compile_backend=foo": ["torch_compile_backend is 'foo'", "inductor"],
    "--training.accelerator_config=no.json": ["training:", "no.json"],
    "--training.metric_for_best_model=acc": ["metric_for_best_model is 'acc'; accepted: loss, bleu"],
    "--training.save_strategy=no": ["training:", "save"],
    "--training.hub_strategy=end": ["training.hub_strategy is not accepted here", "hf-deepwide share"],
    "--training.optim_target_modules=[k_proj]": ["optim_target_modules is read by the optimizers galore and apollo"],
    "--training.output_dir=3": ["training.output_dir: 3 is not accepted; give text"],
    "--training.output_dir=''": ["training.output_dir is empty"],
    "--training.output_dir=recipe.yaml": ["training.output_dir: recipe.yaml is a file"],
    "--training.output_dir=recipe.yaml/run": ["recipe.yaml/run: a part of this path is a file, not a folder"],
    "--training.output_dir=corpus": ["corpus is not empty and holds no run"],
    f"--training.output_dir={'x' * 300}": ["the name is too long"],
    "--training.max_tokens=8": ["the longest pair has", "more than training.max_tokens 8"],
    "--data.train=nowhere": ["no file nowhere.en or nowhere.en.gz", "HF_DEEPWIDE_DATA"],
    "--data.train=/": ["'/' is no prefix of files"],
    f"--data.train={'x' * 5000}": ["the name is too long"],
    "--data.target_lang=fr": ["no file corpus/train.fr", "languages found for this prefix: de, en"],
    "--data.source_lang=../en": ["data.source_lang is '../en'; accepted: a language code"],
    "--data.source_lang=de": ["data.source_lang and data.target_lang are both 'de'"],
    "--data.root=/nowhere": ["no file /nowhere/corpus/train.en"],
    "--data.max_length=2": ["none of the 30 training pairs passes the length filters"],
    "--data.max_length_ratio=.nan": ["data.max_length_ratio is nan; accepted: 1 or more"],
    "--data.seed=-1": ["data.seed"],
    "--data.shuffle_buffer=0": ["data.shuffle_buffer is 0; accepted: 1 or more"],
    "--data.shuffle_buffer=99": ["data.shuffle_buffer is 99, and only streams have a buffer", "20000, the default"],
    "--data.language_tag=none": ["data.language_tag is 'none' but there is one language pair: set data.pairs"],
    "--data.train=": ["--data.train is empty"],
    "--data.validation=": ["--data.validation is empty"],
    "--data.pairs=[../en-de]": ["data.pairs: '../en-de' is no language pair"],
    "--data.pairs=[]": ["data.pairs is empty"],
    "--data.format=phrases": ["data.train is 'corpus/train', and the format phrases does not read it; leave it out"],
    "--data.name=wmt14": ["data.name is 'wmt14', and the format text does not read it", "to null", "datasets)"],
    "--data.format=csv": ["data.format: 'csv' is not accepted; give one of text, tsv"],
    "--tokenizer.vocab_size=10": ["tokenizer.vocab_size is 10, but the text alone has", "or more"],
    "--tokenizer.vocab_size=999999999999999": ["tokenizer.vocab_size is 999999999999999", "10,000,000 at most"],
    "--tokenizer.min_frequency=-1": ["tokenizer.min_frequency is -1; accepted: 1 or more"],
    "--tokenizer.path=/nowhere": ["tokenizer.path '/nowhere': no tokenizer could be loaded: there is no such folder"],
    "--tokenizer.path=corpus": ["tokenizer.path 'corpus'", "the folder holds no tokenizer"],
    "--tokenizer.path=recipe.yaml": ["it is a file; give the folder of a checkpoint"],
    "--model.d_model=17": ["model:", "`encoder_attention_heads` must divide `d_model` (17), got 2"],
    "--model.d_model=1000000000000": ["`d_model` must be at most 10,000,000"],
    "--model.encoder_layers=-1": ["`encoder_layers` must be at least 1, got -1"],
    "--model.dropout=.nan": ["`dropout` must be in [0, 1), got nan"],
    "--model.activation_function=foo": ["`activation_function` must be one of"],
    "--training.pad_to_multiple_of=1000": ["tokens, 1000 when padded", "set training.pad_to_multiple_of: 1"],
    "--model.max_position_embeddings=4": ["a train sentence can have", "the model takes 4"],
    "--model.vocab_size=5": ["model.vocab_size: 5 contradicts the tokenizer, whose vocab_size is"],
    "--model.dtype=foo": ["model.dtype: 'foo' is not accepted"],
    "--model.auto_map={}": ["unknown key 'auto_map'"],
    "--evaluation.num_beams=0": ["evaluation.num_beams is 0"],
    "--evaluation.length_penalty=.nan": ["evaluation.length_penalty is nan"],
    "--evaluation.tokenize=foo": ["tokenize: 'foo'; accepted: auto, none"],
    "--evaluation.precision=float8": ["evaluation.precision: 'float8'; accepted: float32"],
}


@pytest.mark.parametrize("argument", VALUES)
def test_values(argument, workspace, tmp_path, capsys, monkeypatch):
    check((None, [argument], VALUES[argument]), workspace, tmp_path, capsys, monkeypatch)


# Corpora: how they are spoilt, further arguments, words of the message

JSONL = ["--data.format=jsonl", "--data.train=c.jsonl"]
HUB = ["--data.format=datasets", "--data.train=train"]
PAIRS = ["--data.pairs=[en-de]"]
CORPORA = {
    "Latin-1": (lambda at: at.put("corpus/train.de", "ä\n".encode("latin-1")), [], ["line 1: byte 1 (0xe4)"]),
    "UTF-16": (lambda at: at.put("corpus/train.de", "Hund\n".encode("utf-16")), [], ["byte 1 (0xff) is not UTF-8"]),
    "binary": (lambda at: at.put("corpus/train.de", bytes(range(256))), [], ["train.de, line 1: a zero byte"]),
    "empty": (lambda at: at.put("corpus/train.de", ""), [], ["corpus/train.de is empty"]),
    "blank": (lambda at: at.put("corpus/train.de", "\n" * 30), [], ["no pair of the train split is left"]),
    "too few lines": (lambda at: at.put("corpus/train.de", "Hund\n"), [], ["train.en has 30 lines", "has 1, so"]),
    "blank validation": (lambda at: at.put("corpus/valid.de", "\n" * 4), [], ["valid.de, line 1: empty target"]),
    "no test set": (lambda at: at.remove("corpus/test.de"), [], ["no file corpus/test.de"]),
    "a folder": (
        lambda at: (at.remove("corpus/train.de"), at.put("corpus/train.de/x", "")), [], ["no file corpus/train.de"],
    ),
    "not compressed": (
        lambda at: (at.remove("corpus/train.de"), at.put("corpus/train.de.gz", "x\n")), [],
        ["train.de.gz: not a complete gzip file"],
    ),
    "compressed in part": (
        lambda at: (at.remove("corpus/train.de"), at.put("corpus/train.de.gz", gzip.compress(b"x\n" * 9999)[:-9])), [],
        ["train.de.gz: not a complete gzip file", "lines were readable"],
    ),
    "a sentence beyond the model": (
        lambda at: (at.put("corpus/valid.de", "Hund " * 2000), at.put("corpus/valid.en", "dog")), [],
        ["a validation sentence can have", "the model takes 64"],
    ),
    "fewer pairs than accumulation": (
        lambda at: (at.put("corpus/train.de", "Hund\n"), at.put("corpus/train.en", "dog\n")),
        ["--training.gradient_accumulation_steps=2", "--tokenizer.path=tokenizer"],
        ["1 pair cannot make a multiple of 2 batches"],
    ),
    "no JSON": (lambda at: at.put("c.jsonl", "{\n"), JSONL, ["c.jsonl, line 1: not JSON"]),
    "JSON of no object": (lambda at: at.put("c.jsonl", "[1]\n"), JSONL, ["c.jsonl, line 1: a JSON list"]),
    "JSON too deep": (lambda at: at.put("c.jsonl", "[" * 100_000), JSONL, ["line 1: not JSON that can be read"]),
    "JSON with a number too long": (
        lambda at: at.put("c.jsonl", '{"en": ' + "9" * 5000 + "}"), JSONL, ["line 1: not JSON that can be read"],
    ),
    "half a character": (
        lambda at: at.put("c.jsonl", '{"en": "\\ud800", "de": "x"}'), JSONL, ["line 1: half a surrogate pair"],
    ),
    "a number for text": (
        lambda at: at.put("c.jsonl", '{"en": 3, "de": "x"}'), JSONL, ["field 'en' holds int, not text"],
    ),
    "three columns": (
        lambda at: at.put("c.tsv", "a\tb\tc\n"), ["--data.format=tsv", "--data.train=c.tsv"],
        ["c.tsv, line 1: 3 tab-separated columns instead of 2"],
    ),
    "unknown place in a name": (None, [*PAIRS, "--data.train='{nope}'"], ["'{nope}' cannot be filled in", "{pair}"]),
    "attribute in a name": (None, [*PAIRS, "--data.train='{pair.__class__}'"], ["cannot be filled in"]),
    "width in a name": (None, [*PAIRS, "--data.train='{pair:>9999999}'"], ["cannot be filled in"]),
    "a dataset outside": (None, [*HUB, "--data.name=../../nope"], ["data.name '../../nope'", "could not be loaded"]),
    "a dataset of no files": (lambda at: at.put("set/x.foo", ""), [*HUB, "--data.name=set"], ["data.name 'set'"]),
    "a dataset with a script": (
        lambda at: at.put("set/set.py", "open('FIRED', 'w')"), [*HUB, "--data.name=set"],
        ["Dataset scripts are no longer supported"],
    ),
    "a saved dataset, broken": (
        lambda at: at.put("set/dataset_dict.json", "[]"), [*HUB, "--data.name=set"], ["data.name 'set'"],
    ),
    "a stream without steps": (
        None, ["--data.streaming=true", "--training.max_steps=-1"],
        ["data.streaming: a stream has no length; set in the section training: max_steps: N"],
    ),
    "a stream that ends badly": (
        lambda at: at.put("corpus/train.de", b"Hund\n" * 29 + b"\xff\n"),
        ["--data.streaming=true", "--training.max_steps=9", TOKENIZER], ["train.de, line 30: byte 1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CORPORA)
def test_corpora(name, workspace, tmp_path, capsys, monkeypatch):
    check(CORPORA[name], workspace, tmp_path, capsys, monkeypatch)


def foreign_code(at):
    code = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    at.put("tokenizer/tokenizer_config.json", json.dumps(code))
    at.put("tokenizer/evil.py", "open('FIRED', 'w')")


TOKENIZERS = {
    "cut": (lambda at: at.cut("tokenizer/tokenizer.json"), ["tokenizer.json is damaged, or no JSON"]),
    "empty": (lambda at: at.put("tokenizer/tokenizer.json", ""), ["tokenizer.json is damaged, or no JSON"]),
    "a list": (lambda at: at.put("tokenizer/tokenizer.json", "[]"), ["tokenizer.json holds a list"]),
    "no model in it": (lambda at: at.put("tokenizer/tokenizer.json", "{}"), ["no tokenizer could be loaded"]),
    "config cut": (lambda at: at.cut("tokenizer/tokenizer_config.json", 5), ["tokenizer_config.json is damaged"]),
    "config a list": (lambda at: at.put("tokenizer/tokenizer_config.json", "[]"), ["holds a list"]),
    "without padding": (
        lambda at: at.put("tokenizer/tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}'),
        ["it has no pad_token, which the model needs"],
    ),
    "with code": (foreign_code, ["contains custom code"]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(name, workspace, tmp_path, capsys, monkeypatch):
    spoil, words = TOKENIZERS[name]
    case = (spoil, [TOKENIZER], ["tokenizer.path 'tokenizer'", *words])
    check(case, workspace, tmp_path, capsys, monkeypatch)


# What the output folder already holds

MARK = '{"hf_deepwide": "0.1"}'
RUNS = {
    "finished": (
        lambda at: (at.put("run/run.json", MARK), at.put("run/results.json", "{}")), ["run holds a finished run"],
    ),
    "of another recipe": (
        lambda at: [at.put(f"run/{name}", text) for name, text in
                    (("run.json", MARK), ("checkpoint-2/x", ""),
                     ("recipe.yaml", (at.folder / "recipe.yaml").read_text() + "  seed: 7\n"))],
        ["unfinished run of another recipe", "training.seed: 7, now not set"],
    ),
    "of a damaged recipe": (
        lambda at: [at.put(f"run/{name}", text) for name, text in
                    (("run.json", MARK), ("recipe.yaml", "{"), ("checkpoint-2/x", ""))],
        ["run/recipe.yaml, line 1"],
    ),
    "of no recipe": (
        lambda at: [at.put(f"run/{name}", text) for name, text in
                    (("run.json", MARK), ("recipe.yaml", "[]"), ("checkpoint-2/x", ""))],
        ["recipe.yaml is missing or is no recipe"],
    ),
    "of no run": (
        lambda at: (at.put("run/recipe.yaml", "# mine\n{}"), at.put("run/checkpoint-2/x", "")),
        ["run is not empty and holds no run"],
    ),
    "with another's mark": (
        lambda at: (at.put("run/run.json", "{}"), at.put("run/results.json", "{}")),
        ["run is not empty and holds no run"],
    ),
    "that is the recipe's own": (
        lambda at: at.put("recipe.yaml", "# mine\n" + (at.folder / "recipe.yaml").read_text()),
        ["training.output_dir: . is not empty and holds no run"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_folders_of_runs(name, workspace, tmp_path, capsys, monkeypatch):
    spoil, words = RUNS[name]
    own = ["--training.output_dir=.", "--overwrite"] if "own" in name else []
    check((spoil, own, words), workspace, tmp_path, capsys, monkeypatch)


MASKED_LM = {
    "no language": (None, ["--data.languages=[]"], ["data.languages is []"]),
    "a path for a language": (None, ["--data.languages=[../en]"], ["data.languages: '../en' is no language code"]),
    "a language without a file": (None, ["--data.languages=[en, fr]"], ["no file corpus/train.fr"]),
    "no family": (None, ["--model.family=null"], ["give a model type, such as latent_depth or mat_roberta"]),
    "a family without": (None, ["--model.family=mat"], ["'mat' is not for masked language models"]),
    "no probability": (None, ["--data.mask_probability=.nan"], ["data.mask_probability is nan"]),
    "smoothing": (None, ["--training.label_smoothing_factor=0.1"], ["label_smoothing_factor is not accepted"]),
    "binary text": (lambda at: at.put("corpus/train.de", bytes(range(256))), [], ["train.de, line 1: a zero byte"]),
    "blank validation": (
        lambda at: [at.put(f"corpus/valid.{lang}", "\n") for lang in ("en", "de")], [],
        ["data.validation: all lines of en, de are empty"],
    ),
    "sentences beyond the model": (None, ["--model.max_position_embeddings=4"], ["the model takes 4"]),
    "a start that is missing": (
        None, ["--model.init_from=/nowhere", TOKENIZER], ["model.init_from '/nowhere': there is no such folder"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKED_LM)
def test_masked_language_models(name, workspace, tmp_path, capsys, monkeypatch):
    check(MASKED_LM[name], workspace, tmp_path, capsys, monkeypatch, MASKED)
