"""Recipes: mistakes and their error messages, overrides, and the packaged recipes."""

import dataclasses
import re

import pytest
import yaml
from tiny_run import tiny_values, write_recipe
from transformers import (
    CONFIG_MAPPING,
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedConfig,
    Seq2SeqTrainingArguments,
)

import hf_deepwide
from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.data.tokenizer import TokenizerArguments, check_tokenizer, train_tokenizer, training_texts
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.translate import translate
from hf_deepwide.families import FAMILIES
from hf_deepwide.runs.build import build_model, check_memory, new_config
from hf_deepwide.runs.facts import INSTRUCTION_SETS, describe
from hf_deepwide.runs.recipe import (
    PACKAGED,
    Recipe,
    check_recipe,
    differences,
    load_recipe,
    packaged_recipes,
)
from hf_deepwide.runs.schema import reference_comments
from hf_deepwide.runs.yaml_values import to_yaml
from hf_deepwide.training.arguments import REFUSED, TranslationTrainingArguments
from hf_deepwide.training.classification import ClassificationTrainingArguments
from hf_deepwide_cli.recipes import whole

RECIPES = [name for name in packaged_recipes() if not name.startswith(("masked_lm/", "classification/"))]
assert hf_deepwide  # registers the families

WRONG = {
    # the mistake: (section, key, value, words that the message must contain)
    "unknown key": ("training", "learning_rat", 1e-3, ["training", "'learning_rat'", "'learning_rate'"]),
    "unknown data key": ("data", "max_len", 3, ["data", "'max_len'", "'max_length'"]),
    "unknown config field": (
        "model",
        "atention_branches",
        3,
        ["model", "'atention_branches'", "'attention_branches'"],
    ),
    "unknown family": ("model", "family", "matt", ["model.family", "'matt'", "'mat'"]),
    "a family of speech": ("model", "family", "voxtral", ["model.family", "'voxtral' is not for translation"]),
    "a family of two configs": ("model", "family", "t5gemma", ["model.family", "'t5gemma'", "model.init_from"]),
    "no family": ("model", "family", None, ["model.family", "vanilla_transformer"]),
    "text for a number": ("training", "max_steps", "many", ["training.max_steps", "'many'", "whole number"]),
    "a switch for a number": ("training", "max_tokens", True, ["training.max_tokens", "True", "whole number"]),
    "fraction for a count": ("evaluation", "num_beams", 2.5, ["evaluation.num_beams", "2.5", "whole number"]),
    "number for text": ("data", "train", 3, ["data.train", "3", "text or null"]),
    "list of the wrong thing": ("evaluation", "metrics", ["bleu", 3], ["evaluation.metrics", "a list of text"]),
    "out of range in data": ("data", "max_length", 1, ["data.max_length", "2"]),
    "out of range in evaluation": ("evaluation", "num_beams", 0, ["evaluation.num_beams", "0"]),
    "out of range in the model": ("model", "drop_branch", 1.5, ["model", "drop_branch", "1.5"]),
    "wrong type in the model": ("model", "d_model", "wide", ["model", "d_model"]),
    "no effect": (
        "training",
        "per_device_train_batch_size",
        8,
        ["training.per_device_train_batch_size", "max_tokens"],
    ),
    "weights in half precision": ("model", "dtype", "bfloat16", ["model.dtype", "'bfloat16'", "training.bf16"]),
    "base without tokenizer": ("model", "init_from", "runs/base", ["model.init_from", "tokenizer.path", "runs/base"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_names_what_is_wrong(case, tmp_path):
    section, key, value, words = WRONG[case]
    values = tiny_values(tmp_path)
    values[section][key] = value
    path = write_recipe(tmp_path, values)
    with pytest.raises(UserError) as error:
        load_recipe(path)
    for word in [str(path), *words]:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modell: {family: mat}", ["section", "'modell'", "'model'"]),
        ("model: [family, mat]", ["model", "mapping"]),
        ("- model", ["mapping", "tokenizer"]),
        ("model: {family: mat\ndata: 3", ["line"]),
        ("training:\n  seed: 1\n  seed: 2\n", ["line 3", "'seed'", "twice"]),
    ],
)
def test_refuses_files_that_are_no_recipes(text, words, tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as error:
        load_recipe(path)
    for word in [str(path), *words]:
        assert word in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"no recipe .*nowhere\.yaml"):
        load_recipe(tmp_path / "nowhere.yaml")


def test_overrides(tmp_path):
    path = write_recipe(tmp_path, tiny_values(tmp_path))
    recipe = load_recipe(
        path,
        [
            *("--training.learning_rate", "1e-3", "--training.max_steps=7", "--evaluation.length_penalty", "-1"),
            *("--evaluation.metrics", "[bleu]", "--training.weight_decay", "0", "--data.source_lang", "no"),
            "--model.d_model=64",
        ],
    )
    assert recipe.values["training"]["learning_rate"] == 0.001
    assert isinstance(recipe.values["training"]["learning_rate"], float)
    assert recipe.values["training"]["max_steps"] == 7
    assert recipe.evaluation.length_penalty == -1
    assert recipe.data.source_lang == "no", "Norwegian is not false"
    assert recipe.model_fields["d_model"] == 64
    assert recipe.evaluation.metrics == ["bleu"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--training.max_step", "7"], ["'max_step'", "'max_steps'"]),
        (["--trainin.max_steps", "7"], ["--trainin.max_steps", "'training'"]),
        (["--training"], ["--training"]),
        (["--training.max_steps"], ["--training.max_steps", "no value"]),
        (["--training.max_steps", "--training.seed", "1"], ["--training.max_steps", "no value"]),
        (["--training.optim.lr", "1"], ["--training.optim.lr"]),
        (["max_steps", "7"], ["max_steps"]),
    ],
)
def test_odd_overrides_are_refused(arguments, words, tmp_path):
    path = write_recipe(tmp_path, tiny_values(tmp_path))
    with pytest.raises(UserError) as error:
        load_recipe(path, arguments)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"eval_strategy": "sometimes"}, ["sometimes"]),
        ({"bf16": "maybe"}, ["bf16", "maybe"]),
        ({"metric_for_best_model": "bleu"}, ["predict_with_generate"]),
        ({"metric_for_best_model": "rouge"}, ["rouge", "bleu"]),
        ({"average_last": 3, "save_total_limit": 3}, ["save_total_limit", "4"]),
        ({"save_total_limit": 1}, ["save_total_limit 1", "the best checkpoint alone", "2 or more"]),
        ({"save_total_limit": 1, "load_best_model_at_end": False, "metric_for_best_model": "loss"}, ["2 or more"]),
        ({"save_steps": 8}, ["load_best_model_at_end", "eval_steps is 4", "save_steps 8"]),
        ({"save_steps": 0.5, "eval_steps": 0.25}, ["eval_steps is 0.25", "save_steps 0.5"]),
        ({"save_steps": 8, "early_stopping_patience": 2}, ["eval_steps is 4", "save_steps 8"]),
        ({"max_tokens": 0}, ["max_tokens"]),
        ({"save_strategy": "best"}, ["save_strategy"]),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"mode": "max"}},
            ["mode is 'max'", "loss, less is better"],
        ),
        ({"fsdp": "full_shard"}, ["fsdp", "several processes"]),
        ({"optim": "galore_adamw"}, ["optim", "galore-torch"]),
    ],
)
def test_training_arguments_that_contradict_are_refused(fields, words, tmp_path):
    values = tiny_values(tmp_path)
    values["training"] |= fields
    with pytest.raises(UserError) as error:
        check_recipe(values, "tiny", "tiny.yaml").training_arguments()
    for word in ["tiny.yaml", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_a_schedule_that_follows_the_metric_knows_which_way_is_better(schedule, tmp_path):
    """Transformers' default is that less is better, so a rising BLEU would lower the learning rate."""
    values = tiny_values(tmp_path)
    values["training"]["lr_scheduler_type"] = schedule
    assert check_recipe(values, "tiny", "tiny.yaml").training_arguments().lr_scheduler_kwargs["mode"] == "min"
    values["training"] |= {"metric_for_best_model": "bleu", "predict_with_generate": True}
    assert check_recipe(values, "tiny", "tiny.yaml").training_arguments().lr_scheduler_kwargs["mode"] == "max"
    args = ClassificationTrainingArguments(str(tmp_path), lr_scheduler_type=schedule, use_cpu=True)
    assert args.lr_scheduler_kwargs["mode"] == "max", "accuracy"


@pytest.mark.parametrize(
    "fields",
    [
        {"load_best_model_at_end": False, "save_total_limit": 1},
        {"load_best_model_at_end": False, "save_steps": 10},
        {"eval_strategy": "epoch", "save_strategy": "epoch", "eval_steps": None, "save_steps": 500},
    ],
)
def test_training_arguments_that_agree(fields, tmp_path):
    values = tiny_values(tmp_path)
    values["training"] |= fields
    assert check_recipe(values, "tiny", "tiny.yaml").training_arguments().save_strategy


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("save_only_model", True), ("ignore_data_skip", True), ("restore_callback_states_from_checkpoint", False),
        ("enable_jit_checkpoint", True), ("average_tokens_across_devices", False), ("prediction_loss_only", True),
        ("eval_accumulation_steps", 2), ("batch_eval_metrics", True), ("include_for_metrics", ["loss"]),
    ],
)  # fmt: skip
def test_refuses_arguments_that_break_a_promise_or_do_nothing(key, value, tmp_path):
    values = tiny_values(tmp_path)
    values["training"][key] = value
    with pytest.raises(UserError, match=rf"tiny\.yaml: training\.{key} is not accepted here: \w+"):
        check_recipe(values, "tiny", "tiny.yaml")


def test_every_refused_field_exists():
    fields = TranslationTrainingArguments.__dataclass_fields__
    assert not set(REFUSED) - set(fields)


def test_own_fields_are_explained():
    for name in ("max_tokens", "average_last", "early_stopping_patience", "attn_implementation", "keep_memory"):
        assert len(TranslationTrainingArguments.__dataclass_fields__[name].metadata["help"]) > 20


def test_differences_name_keys_and_values(tmp_path):
    ours, theirs = tiny_values(tmp_path), tiny_values(tmp_path / "moved")
    assert differences(ours, theirs) == []
    theirs["training"]["seed"] = 4
    theirs["model"]["attention_branches"] = 3
    assert differences(ours, theirs) == [
        "model.attention_branches: not set, now 3",
        "training.seed: 3, now 4",
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_packaged_recipes_load(name, tmp_path):
    recipe = load_recipe(name, ["--training.output_dir", str(tmp_path)])
    arguments = recipe.training_arguments()
    assert arguments.max_tokens == recipe.values["training"]["max_tokens"]
    assert sum(map(len, recipe.values.values())) > 20
    text = (PACKAGED / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# "), "a comment says what the recipe is"
    assert [line for line in text.splitlines() if re.match(r" +\w+:", line) and not re.search(r" # .{3}", line)] == []


def test_no_message_or_recipe_names_a_script():
    """A user who installs the wheel has the command `hf-deepwide`, but no folder `scripts`."""
    files = [path for path in PACKAGED.parent.rglob("*") if path.suffix in (".py", ".yaml", ".md")]
    assert [path for path in files if "scripts/" in path.read_text(encoding="utf-8")] == []


def test_a_recipe_begins_with_what_it_extends(tmp_path):
    values = tiny_values(tmp_path)
    write_recipe(tmp_path, values)
    child = tmp_path / "child.yaml"
    child.write_text("extends: tiny.yaml\ntraining: {seed: 9}\n")
    loaded = load_recipe(child)
    assert differences(values, loaded.values) == [f"training.seed: {values['training']['seed']}, now 9"]
    assert loaded.name == "child"
    assert load_recipe(child, ["--training.seed", "4"]).values["training"]["seed"] == 4
    assert load_recipe(tmp_path / "tiny.yaml").values["training"]["seed"] == values["training"]["seed"]


@pytest.mark.parametrize("taken", ["path", "codes"])
@pytest.mark.parametrize(
    ("key", "value"), [("vocab_size", 500), ("lowercase", True), ("normalization", "nfc"), ("min_frequency", 3)]
)
def test_keys_of_a_new_tokenizer_are_refused_beside_an_existing_one(key, value, taken, tmp_path):
    """A child that names an existing tokenizer does not inherit such keys from a parent that trains one."""
    values = tiny_values(tmp_path)
    values["tokenizer"] = {taken: "here"}
    path, told = write_recipe(tmp_path, values), rf"tokenizer\.{key} is .* no effect beside tokenizer\.{taken}"
    with pytest.raises(UserError, match=rf"{told}.*\(set by --tokenizer\.{key}\)"):
        load_recipe(path, [f"--tokenizer.{key}", str(value)])
    load_recipe(path, [f"--tokenizer.{key}", str(value), f"--tokenizer.{taken}", "null"])
    load_recipe(path, [f"--tokenizer.{key}", str(getattr(TokenizerArguments, key))])
    values["tokenizer"][key] = value
    with pytest.raises(UserError, match=told):
        load_recipe(write_recipe(tmp_path, values))
    values["tokenizer"] = {key: value}
    path, child = write_recipe(tmp_path, values), tmp_path / "child.yaml"
    load_recipe(path, [f"--tokenizer.{taken}", "here"])
    child.write_text(f"extends: tiny.yaml\ntokenizer: {{{taken}: here}}\n")
    load_recipe(child)
    (tmp_path / "copy.yaml").write_text(whole(child))
    assert load_recipe(tmp_path / "copy.yaml").values["tokenizer"] == {taken: "here"}
    (tmp_path / "recipe.yaml").write_text(to_yaml(load_recipe(child).values))
    (tmp_path / "run.json").write_text('{"hf_deepwide": "1", "name": "tiny"}')
    load_recipe(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("parent", "words"),
    [
        ("extends: child.yaml", ["child.yaml", "parent.yaml", "itself"]),
        ("extends: nowhere.yaml", ["parent.yaml", "nowhere.yaml"]),
        ("extends: 3", ["parent.yaml", "child.yaml", "3"]),
        ("trainig: {}", ["parent.yaml", "child.yaml", "trainig", "training"]),
        ("training: 3", ["parent.yaml", "child.yaml", "mapping"]),
        ("- list", ["parent.yaml", "child.yaml", "mapping"]),
    ],
)
def test_names_both_files_of_a_mistake_in_a_parent(parent, words, tmp_path):
    (tmp_path / "parent.yaml").write_text(parent)
    (tmp_path / "child.yaml").write_text("extends: parent.yaml\n")
    with pytest.raises(UserError) as caught:
        load_recipe(tmp_path / "child.yaml")
    for word in words:
        assert word in str(caught.value)


def test_a_packaged_recipe_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_recipe("quickstart").name == "quickstart"
    with pytest.raises(UserError, match="quickstart"):
        load_recipe("quickstrat")
    (tmp_path / "quickstart").write_text("training: 3")
    with pytest.raises(UserError, match="mapping"):  # a file takes precedence over a packaged recipe
        load_recipe("quickstart")


@pytest.mark.parametrize(
    ("languages", "pairs", "words"),
    [(["sw"], ["en-de", "de-en"], ["no language pair has sw; accepted: de, en"]), (["de"], None, ["data.pairs"])],
)
def test_refuses_languages_without_pairs_before_training(languages, pairs, words, tmp_path):
    values = tiny_values(tmp_path)
    values["evaluation"]["average_languages"] = languages
    if pairs:
        values["data"] = {"format": "phrases", "pairs": pairs}
    with pytest.raises(UserError) as error:
        check_recipe(values, "tiny", "tiny.yaml")
    for word in ["tiny.yaml: evaluation.average_languages", *words]:
        assert word in str(error.value)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(
        training_texts(build_phrases("de", "en", train_size=200)["train"]), TokenizerArguments(vocab_size=150)
    )


@pytest.mark.parametrize(("family", "start"), [("mat", "eos"), ("vanilla_transformer", "eos"), ("marian", "pad")])
def test_ids_come_from_the_tokenizer(family, start, tokenizer, tmp_path):
    config = new_config(check_recipe(tiny_values(tmp_path, family=family), "tiny", "tiny.yaml"), tokenizer)
    assert config.vocab_size == len(tokenizer)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (1, 0, 2)
    assert config.decoder_start_token_id == getattr(tokenizer, f"{start}_token_id")
    assert getattr(config, "forced_eos_token_id", 2) == 2


@pytest.mark.parametrize("family", [name for name in Recipe.families() if name != "t5gemma"])
def test_every_family_gets_a_config(family, tokenizer, tmp_path):
    recipe = check_recipe(tiny_values(tmp_path) | {"model": {"family": family}}, "tiny", "tiny.yaml")
    config = new_config(recipe, tokenizer)
    check_memory(config, "tiny.yaml")
    check_tokenizer(tokenizer, config)
    assert config.decoder_start_token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id)


def test_t5_begins_with_padding(tokenizer, tmp_path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    recipe = check_recipe(tiny_values(tmp_path) | {"model": {"family": "t5", **sizes}}, "tiny", "tiny.yaml")
    model = build_model(recipe, tokenizer, recipe.training_arguments())
    assert model.config.decoder_start_token_id == tokenizer.pad_token_id
    assert len(translate(model, tokenizer, ["Paula kommt"], recipe.evaluation)) == 1


def test_a_run_does_not_search_by_the_rules_of_its_base(tokenizer, tmp_path, caplog):
    """Summarization models forbid repeated trigrams, and set a minimum length."""
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    base = BartForConditionalGeneration(BartConfig(vocab_size=len(tokenizer), **sizes, **heads))
    base.generation_config.update(no_repeat_ngram_size=3, min_length=56, repetition_penalty=1.0, bad_words_ids=[[5]])
    for part in (base, tokenizer):
        part.save_pretrained(tmp_path / "base")
    values = tiny_values(tmp_path / "run") | {"tokenizer": {"path": str(tmp_path / "base")}}
    for family in ("bart", "mat"):
        caplog.clear()
        values["model"] = {"family": family, "init_from": str(tmp_path / "base")}
        recipe = check_recipe(values, "tiny", "tiny.yaml")
        found = build_model(recipe, tokenizer, recipe.training_arguments()).generation_config
        assert (found.no_repeat_ngram_size, found.min_length, found.repetition_penalty) == (None, None, 1.0)
        assert found.bad_words_ids == [[5]]
        assert "searches with no_repeat_ngram_size 3, min_length 56, and the run does not" in caplog.text


def test_families_that_are_not_for_text_are_refused():
    assert not {"voxtral", "qwen2_audio", "encoder-decoder"} & {*Recipe.families()}
    assert {"t5", "mt5", "plbart", "fsmt", "bart", "mat"} <= {*Recipe.families()}


def test_ids_that_contradict_the_tokenizer_are_refused(tokenizer, tmp_path):
    recipe = check_recipe(tiny_values(tmp_path, model={"vocab_size": 999}), "tiny", "tiny.yaml")
    with pytest.raises(UserError, match=r"model\.vocab_size: 999 contradicts"):
        new_config(recipe, tokenizer)


def test_weights_follow_from_the_seed(tokenizer, tmp_path):
    recipe = check_recipe(tiny_values(tmp_path), "tiny", "tiny.yaml")
    arguments = recipe.training_arguments()
    one, two = (build_model(recipe, tokenizer, arguments).state_dict() for _ in range(2))
    assert all((one[name] == two[name]).all() for name in one)


def test_a_recipe_survives_its_own_yaml(tmp_path):
    values = tiny_values(tmp_path)
    values["training"]["learning_rate"] = 1e-05  # PyYAML writes 1.0e-05
    text = yaml.safe_dump(values)
    path = tmp_path / "tiny.yaml"
    path.write_text(text, encoding="utf-8")
    assert differences(load_recipe(path).values, values) == []


def test_the_reference_recipe_explains_every_key():
    comments = reference_comments()
    for section in ("data", "tokenizer", "evaluation"):
        fields = {field.name for field in dataclasses.fields(Recipe.sections[section])}
        assert set(comments[section]) == fields - set(Recipe.refused)
    theirs = {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}
    ours = {field.name for field in dataclasses.fields(TranslationTrainingArguments) if field.init} - theirs
    assert ours <= set(comments["training"])
    general = {field.name for field in dataclasses.fields(PreTrainedConfig)} | {"vocab_size", "use_cache"}
    for family in FAMILIES.values():
        fields = {field.name for field in dataclasses.fields(family.config)} - general
        assert {field for field in fields if not field.endswith("_token_id")} <= set(comments["model"]), family


def test_the_reference_recipe_shows_the_defaults_of_all_families():
    """The shown value is the default of each family that has the key. A comment names a default that differs."""
    text = (PACKAGED / "reference.yaml").read_text(encoding="utf-8")
    section = text.partition("\nmodel:")[2].partition("\ndata:")[0]
    shown = re.findall(r"^  (?:# )?(\w+): (.*?) +# (.*)$", section, flags=re.MULTILINE)
    assert len(shown) > 60
    for key, value, comment in shown:
        for name, family in FAMILIES.items():
            default = {field.name: field.default for field in dataclasses.fields(family.config)}.get(key, value)
            accepted = default in (value, yaml.safe_load(value)) or str(default).lower() in comment
            assert accepted or "default:" in comment, f"{name}: {key}: {default}"


def test_the_reference_recipe_has_the_defaults():
    recipe = load_recipe("reference")
    for section, cls in Recipe.sections.items():
        if section not in ("model", "training"):
            default = cls()
            told = {"train", "validation", "test", "source_lang", "target_lang"}
            for key, value in recipe.values[section].items():
                assert key in told or value == getattr(default, key), f"{section}.{key}"
    fields = {field.name: field.default for field in dataclasses.fields(TranslationTrainingArguments)}
    for key, value in recipe.values["training"].items():
        if key not in ("output_dir", "save_total_limit", "report_to", "metric_for_best_model"):
            assert value == fields[key], key
    config = FAMILIES["vanilla_transformer"].config()
    assert {key: getattr(config, key) for key in recipe.model_fields} == recipe.model_fields


def test_a_key_of_evaluate_is_refused_in_a_recipe():
    with pytest.raises(UserError, match="hf-deepwide evaluate --bootstrap_samples"):
        load_recipe("quickstart", ["--evaluation.bootstrap_samples", "10"])


def test_a_recipe_holds_the_settings_of_the_released_latent_depth():
    fields = load_recipe("ted8_related_o2m_latent_released").model_fields
    config = CONFIG_MAPPING["latent_depth"](**fields)
    assert (config.encoder_layers, config.decoder_layers, config.target_decoder_layers) == (12, 24, 12)
    assert (config.gumbel_temperature, config.soft_selection_steps, config.kl_estimator) == (5, 500, "fairseq")
    assert (config.kl_weight, config.kl_reduction, config.layer_sharing_weight) == (0.1, "mean", 0.1)
    assert not config.latent_encoder


@pytest.mark.parametrize(
    ("text", "name", "flags"),
    [
        ("model name\t: AMD EPYC\nflags\t\t: fpu avx2 avx512_bf16\n\nmodel name\t: B", "AMD EPYC", "avx512_bf16"),
        ("model name : AMD EPYC\nflags : fpu avx2 amx_bf16\n", "AMD EPYC", "amx_bf16"),
    ],
)
def test_machines_of_one_brand_are_told_apart(text, name, flags):
    told = describe(text)
    assert told["model name"] == name
    assert [flag for flag in INSTRUCTION_SETS if flag in told["flags"].split()] == ["avx2", flags]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["--training.max_stepz", "3", "--training.seed", "4"], r"'max_stepz'.*\(set by --training\.max_stepz\)$"),
        (["--data.train", "x", "--data.max_length", "0"], r"data\.max_length is 0.*\(set by --data\.max_length\)$"),
        (["--evaluation.metrics", "[blue]"], r"evaluation\.metrics: blue.*\(set by --evaluation\.metrics\)$"),
    ],
)
def test_a_mistake_on_the_command_line_names_its_option(overrides, told):
    with pytest.raises(UserError, match=told):
        load_recipe("quickstart", overrides)


@pytest.mark.parametrize("task", [TranslationTrainingArguments, ClassificationTrainingArguments])
def test_steps_beside_a_strategy_of_epochs_are_refused(task, tmp_path):
    def make(**fields):
        return task(output_dir=str(tmp_path), use_cpu=True, **fields)

    epochs = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    for name, unset in (("eval", "null"), ("save", "500, the default")):
        with pytest.raises(ValueError, match=rf"{name}_steps is 40, .* with {name}_strategy epoch.*set it to {unset}"):
            make(**epochs, **{f"{name}_steps": 40})
    assert make(**epochs, save_steps=500).save_strategy == "epoch"
    steps = make(eval_strategy="steps", eval_steps=40, save_strategy="steps", save_steps=40)
    assert (steps.eval_steps, steps.save_steps) == (40, 40)


def test_an_edited_copy_of_a_packaged_recipe_is_not_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "quickstart.yaml"
    here.write_text((PACKAGED / "quickstart.yaml").read_text(encoding="utf-8") + "\n# mine\n", encoding="utf-8")
    assert load_recipe("quickstart").name == "quickstart", "they say the same"
    here.write_text(to_yaml({"model": {"family": "mat"}}), encoding="utf-8")
    with pytest.raises(UserError, match=r"quickstart\.yaml, which differs from it, .*write quickstart\.yaml"):
        load_recipe("quickstart")
    assert load_recipe("quickstart.yaml").source == "quickstart.yaml"
    assert load_recipe(PACKAGED / "quickstart.yaml").values["model"]["family"]


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    values = tiny_values(tmp_path / "run")
    values["model"] = {"family": "mat", "init_from": "~/base"}
    values["tokenizer"] = {"path": "~/base"}
    values["data"] = {"train": "~/corpus/train"}
    recipe = check_recipe(values, "tiny", "tiny.yaml")
    assert recipe.init_from == recipe.tokenizer.path == str(tmp_path / "base")
    assert recipe.data.resolve(recipe.data.train) == tmp_path / "corpus" / "train"
    assert recipe.values["model"]["init_from"] == "~/base", "a run keeps what was written"
    values["model"]["init_from"] = values["tokenizer"]["path"] = "some/base"
    recipe = check_recipe(values, "tiny", "tiny.yaml")
    assert recipe.init_from == recipe.tokenizer.path == "some/base", "a name on the Hub"
    values["tokenizer"]["path"] = "~nobody-of-this-name/base"
    with pytest.raises(UserError, match=r"tokenizer\.path: .*nobody of this name has a home"):
        check_recipe(values, "tiny", "tiny.yaml")
