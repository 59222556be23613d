"""Recipes of depth-wise LSTMs on WMT and OPUS-100: the settings of Xu et al. 2024 and of the papers they follow."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from datasets import Dataset
from paper_rows import parameters_of
from transformers import AutoConfig, get_scheduler

from hf_deepwide.data.batches import TokenBatchSampler
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.evaluation.averages import read_scores
from hf_deepwide.runs.recipe import PACKAGED, Recipe, load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = PACKAGED
OPUS = "opus100_m2m_dwlstm"
NAMES = [OPUS, *sorted(path.stem for path in RECIPES.glob("wmt*_dwlstm*.yaml"))]


def recipe_of(name: str) -> Recipe:
    return load_recipe(RECIPES / f"{name}.yaml")


@pytest.mark.parametrize("name", NAMES)
def test_trains_with_the_settings_of_the_paper(name):
    """The sources are section 3.1 and Vaswani et al. 2017. For OPUS-100: the public code of Zhang et al. 2020."""
    recipe = recipe_of(name)
    model, args, evaluation = recipe.model_fields, recipe.training_arguments(), recipe.evaluation
    big, opus = "_big" in name, name == OPUS
    assert (model["d_model"], model["encoder_attention_heads"], model["decoder_attention_heads"]) == (
        (1024, 16, 16) if big else (512, 8, 8)
    )
    assert model["encoder_ffn_dim"] == model["decoder_ffn_dim"] == (4096 if big else 2048)
    dropout = 0.3 if big and "en_de" in name else 0.1
    assert model["dropout"] == model["attention_dropout"] == model["activation_dropout"] == dropout
    assert args.max_steps == (500_000 if opus else 300_000 if big else 100_000)
    assert (args.adam_beta1, args.adam_beta2, args.adam_epsilon) == (0.9, 0.98, 1e-8 if opus else 1e-9)
    assert (args.label_smoothing_factor, args.weight_decay, args.max_grad_norm) == (0.1, 0, 0)
    assert (args.save_strategy, args.save_steps, args.average_last) == ("steps", 1500, 20 if big else 5)
    assert (evaluation.num_beams, evaluation.length_penalty) == (4, 0.6)
    assert (evaluation.max_length_factor, evaluation.max_length_offset) == (1, 50)
    assert recipe.data.max_length == 257, "256 subwords and </s>"


@pytest.mark.parametrize("name", NAMES)
def test_the_schedule_is_vaswanis(name):
    """Check the scheduler that the Trainer makes from the recipe against equation 3 of Vaswani et al. 2017.

    A scheduler's step is the number of updates made before. So the first update has rate 0, as in fairseq.
    """
    recipe = recipe_of(name)
    args = recipe.training_arguments()
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    warmup = args.get_warmup_steps(args.max_steps)
    (factor,) = get_scheduler(args.lr_scheduler_type, optimizer, warmup, args.max_steps).lr_lambdas
    for step in (1, 2, 777, 3999, 4000, 4001, 25_000, 99_999, args.max_steps):
        wanted = recipe.model_fields["d_model"] ** -0.5 * min(step**-0.5, step * 4000**-1.5)
        assert args.learning_rate * factor(step) == pytest.approx(wanted, rel=1e-5)


LARGER = "wmt14_en_de_dwlstm_big_12_6"  # its batches are those of Li et al. 2022: 65,536 tokens with padding


def test_larger_batches_are_those_of_li_et_al():
    args = recipe_of(LARGER).training_arguments()
    assert args.max_tokens * args.gradient_accumulation_steps == pytest.approx(65_536, rel=0.02)


@pytest.mark.parametrize("name", [name for name in NAMES if name != LARGER])
def test_a_step_has_25_000_target_tokens(name):
    """Count tokens without padding, as the paper does. Sentences are as long as in news: some 27 tokens."""
    args = recipe_of(name).training_arguments()
    random = np.random.default_rng(5)
    source = random.lognormal(np.log(23), 0.6, 40_000)
    target = source * random.lognormal(0.05, 0.2, len(source))
    lengths = [np.clip(side, 2, 256).astype(int) for side in (source, target)]
    accumulation = args.gradient_accumulation_steps
    batches = list(TokenBatchSampler(*lengths, args.max_tokens, seed=1, batch_multiple=accumulation))
    steps = np.array([lengths[1][batch].sum() for batch in batches]).reshape(-1, accumulation).sum(1)
    assert steps.mean() == pytest.approx(25_000, rel=0.05)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("wmt14_en_de_dwlstm", 71.83),  # the printed 70.25 is for gates that both stacks share
        ("wmt14_en_de_dwlstm_12", 122.23),
        ("wmt14_en_de_dwlstm_18", 172.63),
        ("wmt14_en_de_dwlstm_24", 223.02),
        ("wmt14_en_de_dwlstm_big_12", 452.04),
        ("wmt14_en_de_dwlstm_big_12_6", 338.75),
    ],
)
def test_models_have_the_sizes_of_table_6(name, millions):
    recipe = recipe_of(name)
    config = AutoConfig.for_model(recipe.family, vocab_size=recipe.tokenizer.vocab_size, **recipe.model_fields)
    assert parameters_of(config) / 1e6 == pytest.approx(millions, abs=0.01)


def test_opus100_has_all_pairs_in_both_directions():
    """English with 99 languages. The pairs of the 94 for which Zhang et al. report scores are evaluated."""
    data = recipe_of(OPUS).data
    others = [pair.removeprefix("en-") for pair in data.pairs if pair.startswith("en-")]
    assert len(set(others)) == 99
    assert sorted(data.pairs) == sorted(pair for other in others for pair in (f"en-{other}", f"{other}-en"))
    published = read_scores(ROOT / "benchmarks" / "opus100_zhang2020.tsv")["transformer"]
    assert sorted(data.evaluated_pairs) == sorted(published)
    assert data.sampling_temperature == 1, "a plain concatenation"
    configs = [data.for_pair(pair).config for pair in ("en-af", "af-en", "es-en", "en-es")]
    assert configs == ["af-en", "af-en", "en-es", "en-es"]


def corpora() -> list[tuple[str, str, list[dict[str, str]]]]:
    """Three tiny corpora: name, split and rows. One corpus has only training data."""
    sizes = {"train": 3, "validation": 2, "test": 1}
    return [
        (name, split, [{lang: f"{lang} {name} {split} {row}" for lang in name.split("-")} for row in range(size)])
        for name in ("af-en", "en-es", "an-en")
        for split, size in sizes.items()
        if name != "an-en" or split == "train"
    ]


def as_on_the_hub(folder: Path) -> dict[str, str | None]:
    """Write `corpora` in the form of the Hub's repository. Return the fields of `data` that the recipe needs."""
    files: dict[str, list] = {}
    for name, split, rows in corpora():
        (folder / name).mkdir(exist_ok=True)
        Dataset.from_dict({"translation": rows}).to_parquet(folder / name / f"{split}-00000-of-00001.parquet")
        files.setdefault(name, []).append({"split": split, "path": f"{name}/{split}-*"})
    configs = [{"config_name": name, "data_files": of_name} for name, of_name in files.items()]
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n", encoding="utf-8")
    return {"name": str(folder)}


def as_distributed(folder: Path) -> dict[str, str | None]:
    """Do the same in the form of the original distribution, with the options that the recipe's comment gives."""
    for name, split, rows in corpora():
        place = folder / "v1.0" / "supervised" / name
        place.mkdir(parents=True, exist_ok=True)
        for lang in name.split("-"):
            file = place / f"opus.{name}-{'dev' if split == 'validation' else split}.{lang}"
            file.write_text("".join(f"{row[lang]}\n" for row in rows), encoding="utf-8")
    comment = (RECIPES / f"{OPUS}.yaml").read_text(encoding="utf-8").partition("--data.format text")[2]
    prefixes = dict(re.findall(r"--data\.(train|validation|test) '(.+)'", comment.partition("\nextends:")[0]))
    assert "--data.name null --data.config null" in comment
    return {"format": "text", "name": None, "config": None, "root": str(folder), **prefixes}


@pytest.mark.parametrize("write", [as_on_the_hub, as_distributed])
def test_opus100_is_read_from_a_folder(write, tmp_path):
    data = dataclasses.replace(
        recipe_of(OPUS).data,
        pairs=["en-af", "af-en", "en-es", "es-en", "an-en"],
        train_only_pairs=["an-en"],
        **write(tmp_path),
    )
    train, validation, test = (load_parallel(data, split) for split in ("train", "validation", "test"))
    assert (len(train), len(validation), len(test)) == (5 * 3, 4 * 2, 4 * 1)
    assert train[12] == {"source": "an an-en train 0", "target": "en an-en train 0", "pair": 4}
    assert [(row["source"], row["target"], row["pair"]) for row in test] == [
        ("en af-en test 0", "af af-en test 0", 0),
        ("af af-en test 0", "en af-en test 0", 1),
        ("en en-es test 0", "es en-es test 0", 2),
        ("es en-es test 0", "en en-es test 0", 3),
    ]
