"""Every figure on every page comes from a committed results file.

A page of benchmarks/ and model_cards/ is written by a function from JSON, and `PAGES` says by which: a page that it
does not have, or that differs from what its function gives, fails. The README is written by hand around tables and
figures that `README` generates: each must be found in it, and once they are taken away no figure, and in its results
no table, may be left. A new table is a line in `README`, with the function that gives its text; a figure in prose is a
line with the words around it, its value computed. What no result says (how large a corpus is) is in `GIVEN`.
"""

import json
import os
import re
import statistics
from functools import partial
from pathlib import Path

import depthwise_lstm
import depthwise_lstm_speed
import finite
import kept_runs
import kernel_caches
import latent_depth
import multi30k
import multipath_speed
import precision
import pytest
import report
import resume_matrix
import streaming
import study
from figures import lines_with_figures, pattern, tables, without

from hf_deepwide.data.corpora import read_lines
from hf_deepwide.evaluation.metrics import score
from hf_deepwide.training.model_card import card_of_results
from hf_deepwide.training.recipe import differences, load_recipe

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DATA = Path(os.environ.get("HF_DEEPWIDE_DATA", ROOT.parent / "shared" / "data"))
STUDIES = sorted(file.stem for file in study.HERE.glob("*.yaml"))


def load(name):
    """A results file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(module, name):
    """What a benchmark's `table` makes of its results."""
    return module.table(load(name))


def quality(name):
    """The table of a quality study."""
    return report.page(*quality_study(name))[1]


def quality_runs(name):
    """The list of a quality study's runs."""
    of_study, results = quality_study(name)
    return report.every_run(of_study, kept_runs.load_results(of_study, results))


def latent(part):
    """A table of the latent-depth benchmark."""
    return getattr(latent_depth, f"{part}_table")(load(f"latent_depth/{part}"))


def lstm(part):
    """A table of the depth-wise LSTM's benchmark."""
    return depthwise_lstm.TABLES[part](load(f"depthwise_lstm/{part}"))


def card(run):
    """The model card of a Multi30k run."""
    return card_of_results(load(f"multi30k_en_de/{run}"), f"multi30k_en_de_{run}")


PAGES = {
    **{f"model_cards/multi30k_en_de_{run}.md": partial(card, run) for run in multi30k.SYSTEMS},
    **{f"benchmarks/results/latent_depth/{part}.md": partial(latent, part) for part in ("one_to_many", "deep")},
    **{f"benchmarks/results/depthwise_lstm/{part}.md": partial(lstm, part) for part in depthwise_lstm.TABLES},
    **{
        f"benchmarks/results/{module.__name__}.md": partial(table, module, module.__name__)
        for module in (depthwise_lstm_speed, finite, kernel_caches, multipath_speed, precision, streaming)
    },
    **{
        f"benchmarks/results/{name}.md": partial(table, precision, name)
        for name in ("precision_amd", "precision_intel_without_amx")
    },
    "benchmarks/results/resume_matrix.md": lambda: resume_matrix.table(
        load("resume_matrix"), len(resume_matrix.cases(seed=1))
    ),
    **{f"benchmarks/quality/results/{name}/table.md": partial(quality, name) for name in STUDIES},
    **{f"benchmarks/quality/results/{name}/runs.md": partial(quality_runs, name) for name in STUDIES},
}
ELSEWHERE = {  # pages whose own tests compare them
    "benchmarks/results/paper_tables.md": "test_paper_tables.py",
    **{
        path.relative_to(ROOT).as_posix(): "test_quality_study.py"
        for path in (ROOT / "model_cards").glob("quality_*.md")
    },
}

# --- the README ---

WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ORDINALS = ["", "first", "second", "third"]


def keys_of(recipe):
    """The keys of all sections of a recipe, in one."""
    return {key: value for keys in recipe.values() for key, value in keys.items()}


def ran(run, file="multi30k_en_de/{}"):
    """The recipe that a results file says was run."""
    return keys_of(load(file.format(run))["recipe"])


def said_in_recipe(name):
    """A recipe that is committed."""
    return keys_of(load_recipe(ROOT / "scripts" / "recipes" / f"{name}.yaml").values)


def power(number):
    """0.002 as 2e-3."""
    return f"{number:.0e}".replace("e-0", "e-")


def speed_of_bfloat16(file):
    """In training: of the sizes of model the lowest and the highest."""
    speeds = [row["speed_of_bfloat16"] for row in load(file)["speed"].values()]
    return f"{min(speeds):.1f} to {max(speeds):.1f} times as fast"


def epochs_ahead(run, rival):
    """After how many epochs the validation loss was lower than the rival's, from the first on."""
    losses = load("multi30k_en_de/validation_loss")
    behind = [ours >= theirs for ours, theirs in zip(losses[run].values(), losses[rival].values(), strict=True)]
    return behind.index(True)


def best_epoch(run):
    """The epoch after which a run's validation loss was the lowest."""
    losses = list(load("multi30k_en_de/validation_loss")[run].values())
    return 1 + losses.index(min(losses))


def trained_on(metric):
    """The proximal MAT against the vanilla model that was trained for as long."""
    assert multi30k.AGAINST["mat"] == "vanilla_longer"
    return load("multi30k_en_de/comparison")["mat"][metric]


def one_to_many():
    """Recipes and results of the static and of the latent model."""
    runs = load("latent_depth/one_to_many")["runs"]
    return [
        (keys_of(runs[name]["recipe"]), runs[name]["train"]) for name in (latent_depth.STATIC, latent_depth.LATENT)
    ]


def depth(run):
    """Recipe and results of a run of the depth-wise LSTM's comparison by depth."""
    results = load("depthwise_lstm/depth")["runs"][f"multi30k_en_de_{run}"]["results"]
    return keys_of(results["recipe"]), results["train"]


def lstm_recipe(part, *path):
    """The recipe of a run in one of the depth-wise LSTM's results files."""
    results = load(f"depthwise_lstm/{part}")
    for key in path:
        results = results[key]
    return keys_of(results["recipe"])


def gradient_norms():
    """Step to norms of stack and layer, of the depth-wise LSTM."""
    return load("depthwise_lstm/gradients")["multi30k_en_de_dwlstm_24_layers"]["norms"]


def vanishing():
    """The first logged step from which the lowest layer's gradient stays below the highest's, in both stacks."""
    below = {
        int(step): all(layers[0] < layers[-1] for layers in stacks.values())
        for step, stacks in gradient_norms().items()
    }
    return max(step for step in below if not below[step]) + min(below)


def diverged():
    """Validations of the run that was stopped."""
    return load("latent_depth/deep")["multi30k_en_de_deep_postnorm"]["validation_loss"]


def quality_study(name="multi30k"):
    """A study, that of the top if no other is asked for, and where its results lie."""
    return study.load_study(study.HERE / f"{name}.yaml"), study.HERE / "results" / name


def hours_of_a_round():
    """How long one run of each system of the study at the top takes two cores: those that were made again in one go.

    A study is such a round for each setting of the search, and for each of the other seeds.
    """
    of_study, results = quality_study()
    loaded = kept_runs.load_results(of_study, results)
    runs = [loaded[system.name][key] for system in of_study.systems for key in loaded[system.name] if key[1] == 4]
    assert len(runs) == len(of_study.systems)
    assert {run["machine"]["processor"] for run in runs} == {"Intel(R) Xeon(R) Processor"}
    assert {run["train"]["precision"] for run in runs} == {"bf16 autocast"}, "what `auto` is on Intel's with AMX alone"
    return sum(run["wall_minutes"] for run in runs) / 60 / 2


def rounds():
    """How often a system of the study at the top is trained."""
    of_study, _ = quality_study()
    return len(of_study.search) + len(of_study.seeds) - 1


def made_twice(folder):
    """Of runs that were made twice: what that of the table says of itself, and what that in the folder does."""
    results = study.HERE / "results" / "multi30k"
    files = sorted((results / folder).glob("*.json"))
    assert files
    for file in files:
        system = file.name.partition("_learning_rate")[0]
        yield [json.loads(path.read_text(encoding="utf-8")) for path in (results / system / file.name, file)]


def other_arithmetic():
    """How far runs in float32 and the same in bfloat16 ended from each other, in sacreBLEU."""
    apart = [abs(ours["test"]["bleu"] - other["test"]["bleu"]) for ours, other in made_twice("other_arithmetic")]
    return (
        f"{WORDS[len(apart)]} runs in float32 and in bfloat16 ended {statistics.mean(apart):.1f} sacreBLEU from [each "
        f"other](benchmarks/quality/results/multi30k/other_arithmetic/) on average, and {max(apart):.1f} at most"
    )


README = {
    # at the top, and what explains it
    **{
        f"quality: {name}": lambda name=name: report.overview(*quality_study(name))
        for name in STUDIES
        if (study.HERE / "results" / name).is_dir()
    },
    "its size": lambda: "at {:.0f} million parameters, {num_train_epochs} epochs".format(
        report.page(*quality_study())[0]["vanilla"]["parameters"] / 1e6,
        **{key.rpartition(".")[2]: value for key, value in quality_study()[0].overrides.items()},
    ),
    "its hours": lambda: (
        f"one run of each system, translation and scores included, took two cores with AMX {hours_of_a_round():.1f} "
        f"hours; the study is {WORDS[rounds()]} of each, {rounds() * hours_of_a_round():.1f} hours"
    ),
    # under "Runs that are left alone"
    "other arithmetic": other_arithmetic,
    "bfloat16": lambda: f"{speed_of_bfloat16('precision')} on a processor with AMX",
    "bfloat16 of AMD": lambda: f"{speed_of_bfloat16('precision_amd')} on one of AMD with AVX-512's BF16",
    "bfloat16 of Intel": lambda: f"{speed_of_bfloat16('precision_intel_without_amx')} on one of Intel with that alone",
    "few kernels": lambda: (
        "{peak_by_default:.2f} times the memory in {seconds_by_default:.2f} times the time"
    ).format(**load("kernel_caches")["caches"]["bounded"]),
    # Multi30k
    "multi30k": multi30k.table,
    "its setting": lambda: (
        "{encoder_layers} + {decoder_layers} layers, d {d_model}, joint BPE of {vocab_size:,}, batches of "
        "{max_tokens:,} tokens, bf16, {num_train_epochs} epochs, one seed"
    ).format(**ran("vanilla")),
    "trained on": lambda: (
        f"with p of {trained_on('bleu')['p_randomization']:.2f}; in chrF the MAT is ahead by "
        f"{trained_on('chrf')['difference']:.2f}, with p of {trained_on('chrf')['p_randomization']:.3f}"
    ),
    "its best epoch": lambda: (
        f"the checkpoint after the {ORDINALS[best_epoch('vanilla_longer')]} epoch more is the best"
    ),
    "too few": lambda: f"{ran('mat_scratch')['num_train_epochs']} epochs are too few for it",
    "ahead": lambda: f"is ahead until epoch {epochs_ahead('multipath', 'vanilla')} and then overfits",
    "no better": lambda: f"with p of {load('multi30k_en_de/comparison')['multipath']['bleu']['p_randomization']:.2f}",
    # several languages, latent depth
    "one-to-many": partial(latent, "one_to_many"),
    "its models": lambda: (
        f"d {one_to_many()[1][0]['d_model']}, {one_to_many()[1][0]['num_train_epochs']} epochs, one seed, one core "
        f"each: a decoder of {WORDS[one_to_many()[1][0]['decoder_layers']]} latent layers, told to use "
        f"{WORDS[one_to_many()[1][0]['target_decoder_layers']]} on average, against one of "
        f"{WORDS[one_to_many()[0][0]['decoder_layers']]} static layers"
    ),
    "its steps": lambda: f"After {one_to_many()[1][1]['steps']:,} steps most posteriors",
    "deep": partial(latent, "deep"),
    "deep models": lambda: (
        "of {decoder_layers} layers, at a learning rate of {rate}, the post-norm Transformer diverges".format(
            rate=power(said_in_recipe("multi30k_en_de_deep_postnorm")["learning_rate"]),
            **said_in_recipe("multi30k_en_de_deep_postnorm"),
        )
    ),
    "deep curves": lambda: (
        f"three decoders of {said_in_recipe('multi30k_en_de_deep_postnorm')['decoder_layers']} layers"
    ),
    "diverged": lambda: f"it was stopped after {WORDS[len(diverged())]} epochs",
    # depth-wise LSTM
    **{f"depth-wise LSTM, {part}": partial(lstm, part) for part in depthwise_lstm.TABLES},
    "cost": partial(table, depthwise_lstm_speed, "depthwise_lstm_speed"),
    "depth": lambda: (
        f"N + N layers of d {depth('dwlstm_6_layers')[0]['d_model']}, "
        f"{depth('dwlstm_6_layers')[0]['num_train_epochs']} epochs "
        f"({depth('dwlstm_from_base')[0]['num_train_epochs']} from the base, after its own "
        f"{depth('vanilla_6_layers')[0]['num_train_epochs']}), one seed"
    ),
    "steps of an epoch": lambda: "one validation an epoch, of {steps:.0f} steps".format(
        steps=depth("vanilla_6_layers")[1]["steps"] / depth("vanilla_6_layers")[1]["epochs"]
    ),
    "too deep": lambda: f"at {depth('dwlstm_12_layers')[0]['encoder_layers']} layers it has hardly begun to translate",
    "forget gate": lambda: f"helps at {depth('dwlstm_12_layers')[0]['encoder_layers']} layers",
    "vanishing": lambda: (
        f"At {len(gradient_norms()['10']['encoder'])} layers the LSTM's gradients first grow towards the lower "
        f"layers, and after {vanishing()} steps vanish there"
    ),
    "open questions": lambda: "({encoder_layers} + {decoder_layers} layers, {epochs} epochs)".format(
        epochs=WORDS[lstm_recipe("defaults", "query_self")["num_train_epochs"]],
        **lstm_recipe("defaults", "query_self"),
    ),
}
# what is no result: of the corpus, of the paper
GIVEN = ("Multi30k is task 1", "trained on 29,000 pairs", "The paper trains on 4.5 million pairs")
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", README)
def test_the_readme_has_what_the_results_say(name):
    text = README[name]()
    assert pattern(text).search(TEXT), f"by the results the README says: {text}"


@pytest.mark.parametrize("text", GIVEN)
def test_what_is_given_is_still_said(text):
    assert pattern(text).search(TEXT)


def test_no_figure_of_the_readme_is_without_a_source():
    rest = without(TEXT, [*(generate() for generate in README.values()), *GIVEN])
    assert tables(rest.partition("\n## Results\n")[2]) == [], (
        "not generated by anything that tests/test_results.py has"
    )
    assert lines_with_figures(rest) == [], "figures that nothing in tests/test_results.py computes: see its beginning"


# --- the pages ---


def pages():
    """The Markdown files that hold results, by their path."""
    files = [*(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "model_cards").glob("*.md")]
    return sorted(file.relative_to(ROOT).as_posix() for file in files if not file.is_symlink())


def test_every_page_has_a_source():
    assert sorted({*pages()} - PAGES.keys() - ELSEWHERE.keys()) == [], "say in tests/test_results.py what writes it"


@pytest.mark.parametrize("page", [page for page in pages() if page in PAGES])
def test_a_page_is_what_the_results_say(page):
    assert (ROOT / page).read_text(encoding="utf-8") == PAGES[page]()


@pytest.mark.parametrize("name", STUDIES)
def test_the_summary_of_a_study_is_what_its_runs_say(name):
    folder = study.HERE / "results" / name
    summary = report.page(study.load_study(study.HERE / f"{name}.yaml"), folder)[0]
    assert (json.loads((folder / "summary.json").read_text(encoding="utf-8")) if summary else {}) == summary


# --- what was run ---


def recipes_of_runs():
    """Name of each recipe, and what the committed results say was run."""
    for run in multi30k.SYSTEMS:
        yield f"multi30k_en_de_{run}", load(f"multi30k_en_de/{run}")["recipe"]
    for run, results in load("latent_depth/one_to_many")["runs"].items():
        yield run, results["recipe"]


@pytest.mark.parametrize(("name", "ran"), recipes_of_runs())
def test_a_run_is_of_its_committed_recipe(name, ran):
    """Nothing was changed between the recipe and the run but where it was written."""
    recipe = load_recipe(str(ROOT / "scripts" / "recipes" / f"{name}.yaml"), []).values
    for section, values in ran.items():
        ours = {**recipe[section]}
        for place in ("output_dir", "root"):
            values.pop(place, None)
            ours.pop(place, None)
        assert values == ours


@pytest.mark.parametrize("name", STUDIES)
def test_a_run_of_a_study_is_of_its_recipe(name):
    """The study was not changed after the run."""
    of_study = study.load_study(study.HERE / f"{name}.yaml")
    systems = {system.name: system for system in of_study.systems}
    settings = {kept_runs.key_of(setting): setting for setting in of_study.search}
    kept = kept_runs.load_results(of_study, study.HERE / "results" / name)
    for system in kept.keys() & systems.keys():
        for (setting, seed), run in kept[system].items():
            folder = Path(run["recipe"]["training"]["output_dir"]).parent
            recipe = study.recipe_of(of_study, systems[system], settings[setting], seed, folder)
            assert differences(recipe.values, run["recipe"]) == []


@pytest.mark.skipif(not DATA.is_dir(), reason="needs the corpora, by HF_DEEPWIDE_DATA")
@pytest.mark.parametrize("name", STUDIES)
def test_translations_that_are_kept_have_the_score_of_their_run(name, monkeypatch):
    monkeypatch.setenv("HF_DEEPWIDE_DATA", str(DATA))
    of_study = study.load_study(study.HERE / f"{name}.yaml")
    references, lowercase = kept_runs.test_references(of_study)
    for file in sorted((study.HERE / "results" / name).rglob("*.txt")):
        run = json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))
        metric = of_study.metric
        scores = score(list(read_lines(file)), references, lowercase=lowercase, metrics=[metric])
        assert scores[metric] == pytest.approx(run["test"][metric]), file.name


def test_more_dropout_gave_no_system_a_better_validation_loss():
    """Which the README says of the search on Multi30k."""
    loaded = study.load_study(study.HERE / "multi30k.yaml")
    everything = kept_runs.load_results(loaded, study.HERE / "results" / "multi30k")
    rate = "training.learning_rate"
    (more,) = [setting for setting in loaded.search if setting["model.dropout"] == 0.2]
    (less,) = [setting for setting in loaded.search if setting[rate] == more[rate] and setting != more]
    for system in loaded.systems:
        losses = [
            everything[system.name][kept_runs.key_of(setting), 1]["train"]["best_validation_loss"]
            for setting in (less, more)
        ]
        assert losses[0] < losses[1], system.name


def test_runs_that_were_made_again_came_out_the_same():
    """On another machine with such a processor, by a later version of the library: to the last digit."""
    for first, again in made_twice("made_again"):
        assert differences(first["recipe"], again["recipe"]) == []
        assert first["train"]["minutes"] != again["train"]["minutes"], "the same run"
        for key in ("steps", "target_tokens", "best_validation_loss", "weights"):
            assert first["train"][key] == again["train"][key]
        assert first["test"] == again["test"]


def test_runs_in_other_arithmetic_were_of_the_same_recipes():
    for ours, other in made_twice("other_arithmetic"):
        assert differences(ours["recipe"], other["recipe"]) == []
        assert sorted(run["train"]["precision"] for run in (ours, other)) == ["bf16 autocast", "float32"]
        for key in ("steps", "target_tokens"):
            assert ours["train"][key] == other["train"][key]


TITLES = {  # what a title says, and the keys of the recipe that say so
    r"(\d+) branch(?:es)?": ["attention_branches"],
    r"drop-branch ([\d.]+)": ["drop_branch"],
    r"(\d+) paths": ["encoder_paths"],
    r"(\d+) encoder layers": ["encoder_layers"],
    r"target depth of (\d+) \+ (\d+) layers": ["target_encoder_layers", "target_decoder_layers"],
    r"forget bias (\d+)": ["forget_bias_init"],
    r"\bd (\d+)": ["d_model"],
    r"(\d+) epochs more": ["num_train_epochs"],
    r"(\d+) of the (\d+) epochs as vanilla": ["num_train_epochs", "epochs of the study"],
}


def titles():
    """Title of each row, and the keys of its recipe."""
    for run, title in multi30k.SYSTEMS.items():
        yield title, ran(run)
    for name in STUDIES:
        of_study = study.load_study(study.HERE / f"{name}.yaml")
        epochs = {"epochs of the study": of_study.overrides["training.num_train_epochs"]}
        for system in of_study.systems:
            recipe = study.recipe_of(of_study, system, of_study.search[0], of_study.seeds[0], Path("runs"))
            yield system.title, keys_of(recipe.values) | epochs


def test_titles_of_rows_say_what_the_recipes_have():
    for title, recipe in titles():
        rest = title
        for words, keys in TITLES.items():
            for said in re.finditer(words, rest):
                assert [float(figure) for figure in said.groups()] == [recipe[key] for key in keys], title
            rest = re.sub(words, "", rest)
        assert lines_with_figures(rest) == [], title


# --- the tests themselves ---


@pytest.mark.parametrize(
    ("page", "left"),
    [
        ("BLEU is 31.5.", ["BLEU is 31.5."]),
        ("It took\n12 hours on 2 cores.", ["12 hours on 2 cores."]),
        ("Multi30k, bf16, Apache-2.0, `x=3`, [Fan et al. 2020](https://arxiv.org/abs/2006.10270)", []),
        ("```\nx = 3\n```\n<!-- 7 -->", []),
        ("at p of\n0.82", []),
        ("| a | 7 |\n|---|---|\n| b | 8 |\n", ["| a | 7 |", "| b | 8 |"]),
        ("| a | 1 |\n|---|---|\n| b | 2 |\n", []),
    ],
)
def test_figures_are_found(page, left):
    rest = without(page, ["p of 0.82", "| a | 1 |\n|---|---|\n| b | 2 |\n"])
    assert lines_with_figures(rest) == left
    assert len(tables(rest)) == ("|---" in page and bool(left))
