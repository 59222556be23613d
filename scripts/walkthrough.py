# %% [markdown]
# # From two text files to a model that can be shared
#
# This is a script and a notebook in one. As a script:
#
#     python scripts/walkthrough.py                                       # on phrases made here
#     python scripts/walkthrough.py --source corpus.de --target corpus.en --source_lang de --target_lang en
#
# The script needs the extra `phrases`: `pip install '.[phrases]'` in this repository.
#
# As a notebook: open it in VS Code, which runs the cells between `# %%`, or convert it by
# `jupytext --to notebook scripts/walkthrough.py`; options are then set in the first cell, in `ARGUMENTS`.
#
# All output goes to `--folder`: a new folder, or the folder of an earlier run of this script. If you run the script
# again, it continues where it was interrupted, and trains nothing twice. With `--overwrite` it begins again.

# %%
"""From two text files to a shared checkpoint: look, split, train, widen, compare, translate, share."""

import hashlib
import json
import logging
import shlex
import subprocess
import sys
from pathlib import Path

from datasets import Dataset
from transformers import pipeline
from transformers.utils.logging import disable_progress_bar

import hf_deepwide
from hf_deepwide.analysis.learning_curves import plot_runs
from hf_deepwide.data.phrases import build_phrases
from hf_deepwide.data.text_files import read_lines
from hf_deepwide.durable import check_output, write_whole
from hf_deepwide.errors import UserError, one_line_errors
from hf_deepwide.evaluation.metrics import check_parallel
from hf_deepwide.evaluation.significance import compare_systems
from hf_deepwide.runs.recipe import Recipe, differences, load_recipe, used_values
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.runs.suggestions import measure, suggest_settings
from hf_deepwide.runs.yaml_values import to_yaml
from hf_deepwide.training.history import load_history
from hf_deepwide_cli.parser import Parser

ARGUMENTS = [] if "ipykernel" in sys.modules else sys.argv[1:]
parser = Parser(
    description=__doc__,
    epilog="Any key of the recipe can be set by its dotted name, e.g. --training.num_train_epochs 10",
    allow_abbrev=False,
)
parser.add_argument("--source", type=Path, help="text to translate from, one sentence a line; .gz as well")
parser.add_argument("--target", type=Path, help="its translation: line 7 of this file translates line 7 of the other")
parser.add_argument("--source_lang", default="de", help="language code (default: %(default)s)")
parser.add_argument("--target_lang", default="en", help="language code (default: %(default)s)")
parser.add_argument("--phrases", type=int, default=10_000, help="how many are made, without files of your own")
parser.add_argument("--folder", type=Path, default=Path("runs", "walkthrough"), help="(default: %(default)s)")
parser.add_argument("--overwrite", action="store_true", help="begin again, and replace what is in the folder")
script, overrides = parser.parse_known_args(ARGUMENTS)

one_line_errors()  # an error in a file or an option is one line, without a traceback
logging.basicConfig(format="%(message)s", level=logging.WARNING)
logging.getLogger("hf_deepwide").setLevel(logging.INFO)
disable_progress_bar()  # for loading weights; training and translating have their own progress bars
folder, source_lang, target_lang = script.folder, script.source_lang, script.target_lang


def write(path: Path, text: str) -> None:
    """Write a file in the folder. Other content is replaced only with `--overwrite`, and an input file never."""
    check_output(path, inputs=[file for file in (script.source, script.target) if file], overwrite=True)
    if path.is_file() and path.read_bytes() != text.encode() and not script.overwrite:
        raise UserError(
            f"{path} holds something else (of other data or options?); give another --folder, or --overwrite to begin "
            "again"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def lines(texts: list[str]) -> str:
    """A text of one sentence a line."""
    return "".join(f"{text}\n" for text in texts)


# %% [markdown]
# ## The data
#
# Parallel text is two files in UTF-8 with one sentence on each line. Line n of one file translates line n of the
# other. Only the line number shows which sentences belong together, so one lost line spoils all pairs that follow it.
#
# If you give no files, this script makes phrases: dates, times, prices, counts.

# %%
if (script.source is None) != (script.target is None):
    raise UserError("give both --source and --target, or neither")
asked = load_recipe("multi30k_en_de_vanilla", overrides)  # errors in options come first
source_file, target_file = script.source, script.target
if source_file is None:
    source_file, target_file = (folder / f"phrases.{language}" for language in (source_lang, target_lang))
    phrases = build_phrases(source_lang, target_lang, train_size=script.phrases)["train"]
    sources, targets = phrases["source"][:], phrases["target"][:]
else:
    for file in (source_file, target_file):
        if not file.is_file():
            raise UserError(f"there is no file {file}")
    sources, targets = list(read_lines(source_file)), list(read_lines(target_file))  # an error names the line
    check_parallel(sources, targets, (str(source_file), str(target_file)))  # both have the same number of lines
pairs = {source: target for source, target in zip(sources, targets, strict=True) if source.strip() and target.strip()}
if len(pairs) < 50:
    raise UserError(f"{source_file}: {len(pairs)} different sentences are too few to train on; give thousands")

print(f"\n{len(sources):,} pairs in {source_file} and {target_file}\n")
for source, target in zip(sources[:3], targets[:3], strict=True):
    print(f"  {source_lang}: {source}\n  {target_lang}: {target}\n")

# %% [markdown]
# How to find mistakes in the data:
#
# - *Unequal numbers of lines*: the script has ended above, with `corpus.de: 812 lines; corpus.en: 811 lines`.
# - *A shift*: each file has lost another line, so the numbers of lines are equal. The script does not notice this.
#   Read some pairs in the middle and at the end, not only the first pairs above.
# - *Pairs with one side far longer than the other* are often two sentences against one, or a heading against a
#   paragraph. The cell below shows the pairs with the oddest lengths. A few such pairs do no harm, but if most of them
#   are wrong, find out why.
# - *A sentence that is not translated*, and thus the same on both sides, teaches the model to copy.

# %%
usual = sum(map(len, targets)) / sum(map(len, sources))


def oddness(line: int) -> float:
    """How many times longer one side of a pair is than expected from the length of the other side."""
    times = (len(targets[line]) + 1) / ((len(sources[line]) + 1) * usual)
    return max(times, 1 / times)


for line in sorted(range(len(sources)), key=oddness)[-3:]:
    print(f"  line {line + 1}, {oddness(line):.1f} x: {sources[line][:100]}  |  {targets[line][:100]}")
same = sum(source == target for source, target in zip(sources, targets, strict=True))
print(f"\n{same:,} pairs are the same on both sides\n")

# %% [markdown]
# ## Training, validation and test set
#
# The validation set is for choosing the checkpoint. The test set is used only once, at the end. No sentence may be in
# two of the three sets. Otherwise the score would measure how well the model remembers. So the script keeps each
# source sentence only once.
#
# Sentences of one document are alike, too. The script splits at random, so sentences of one document can be in two
# sets. If your text comes from documents, make the three sets yourself, with whole documents in the test set. Then
# train by a recipe, as `docs/getting-started.md` shows.

# %%
mark = folder / "walkthrough.json"  # shows that this script made the folder, and from which data
if not mark.is_file():
    check_output(folder, overwrite=script.overwrite, option="--overwrite")
digest = hashlib.sha256(lines([*sources, *targets]).encode()).hexdigest()
write(mark, json.dumps({"source_lang": source_lang, "target_lang": target_lang, "sha256": digest}, indent=2) + "\n")
if script.source is None:
    write(source_file, lines(sources))
    write(target_file, lines(targets))

dataset = Dataset.from_dict({"source": list(pairs), "target": list(pairs.values())})
held_out = min(500, len(dataset) // 10)
without_test = dataset.train_test_split(test_size=held_out, seed=1)
without_both = without_test["train"].train_test_split(test_size=held_out, seed=1)
splits = {"train": without_both["train"], "validation": without_both["test"], "test": without_test["test"]}
for name, split in splits.items():
    write(folder / "data" / f"{name}.{source_lang}", lines(split["source"][:]))
    write(folder / "data" / f"{name}.{target_lang}", lines(split["target"][:]))
    print(f"{name:<11} {len(split):>9,} pairs")

# %% [markdown]
# ## A recipe
#
# A recipe is one YAML file that contains all settings of a run. The recipe here starts from a recipe of the library,
# which explains each key. A small corpus needs a narrower model. Vocabulary, batches, epochs and warm-up are chosen
# from the size of the corpus. Values on the command line override all other values.

# %%
suggested = suggest_settings(measure(splits["train"]["source"][:], splits["train"]["target"][:]))
if suggested.expectation:
    print(f"\nWhat to expect of {len(splits['train']):,} pairs: {suggested.expectation}")
data = ["--data.root", str(folder / "data"), "--data.source_lang", source_lang, "--data.target_lang", target_lang]
data += shlex.split("--data.train train --data.validation validation --data.test test")
small = shlex.split(f"""
    --model.d_model 128 --model.encoder_layers 2 --model.decoder_layers 2
    --model.encoder_ffn_dim 512 --model.decoder_ffn_dim 512
    --training.num_train_epochs {suggested.num_train_epochs} --training.warmup_steps {suggested.warmup_steps}
    --training.learning_rate 3e-3
""")
if not asked.tokenizer.path:  # a given tokenizer is not changed
    small += shlex.split(f"--tokenizer.vocab_size {suggested.vocab_size} --tokenizer.split_digits true")
both = shlex.split(f"--training.max_tokens {suggested.max_tokens} --training.predict_with_generate false")


def recipe_of(name: str, run: str, *options: str) -> Recipe:
    """Load a recipe of the library with our data and options, for the folder `run`, and write it to a file."""
    options = (*data, *both, *options, "--training.output_dir", str(folder / run), *overrides)
    recipe = load_recipe(name, options)
    written = folder / f"{run}.yaml"
    write(written, to_yaml(used_values(recipe.values)))
    print(f"\n{written}, for scripts/train_translation.py:\n\n{written.read_text(encoding='utf-8')}")
    return recipe


vanilla = recipe_of("multi30k_en_de_vanilla", "vanilla", *small)

# %% [markdown]
# ## The baseline
#
# One call trains the tokenizer and the model, keeps the checkpoint with the best validation loss, and translates and
# scores the test set. It writes all results, with a model card, to the run's folder. The loss should fall quickly at
# first, and then slowly. If the loss does not fall, lower the learning rate. If the validation loss rises while the
# training loss falls, the corpus is too small for the model: use more dropout, a smaller model, or more text.


# %%
def train(recipe: Recipe) -> dict:
    """Return the content of a run's results.json. Train now, unless an earlier run had the same recipe."""
    results = recipe.output_dir / "results.json"
    if results.is_file() and not script.overwrite:
        earlier = json.loads(results.read_text(encoding="utf-8"))
        if not differences(earlier["recipe"], recipe.values):
            return earlier
    return run_recipe(recipe, script.overwrite)


results = {"vanilla": train(vanilla)}

# %% [markdown]
# ## A wide model that starts as the baseline
#
# A multi-branch attentive Transformer (MAT) has several attentions side by side, called branches. With proximal
# initialization, each branch starts as a copy of the baseline's attention, so the model first computes the same as the
# baseline. Training continues at a lower learning rate, and drops branches at random, so that the branches become
# different. In the recipe, `model.init_from` and `tokenizer.path` name the baseline, and `model.attention_branches`
# sets the number of copies.

# %%
base = str(vanilla.output_dir)
mat = recipe_of(
    "multi30k_en_de_mat",
    "mat",
    *("--model.init_from", base, "--tokenizer.path", base, "--model.attention_branches", "2"),
    *("--training.num_train_epochs", str(max(1, suggested.num_train_epochs // 2))),
    *("--training.warmup_steps", str(max(1, suggested.warmup_steps // 2)), "--training.learning_rate", "1e-3"),
)
results["mat"] = train(mat)

# %% [markdown]
# ## Which is better?
#
# The test compares the two systems sentence by sentence. A small p means that chance *in the choice of the test set*
# would seldom give a difference as large as this. The test does not measure chance in training. To measure that, train
# both systems with other seeds, each in a folder of its own (`--training.seed 2 --folder runs/seed-2`).
#
# And be fair: here the MAT has been trained for longer than the baseline, and has more parameters. To see the effect
# of longer training alone, train the baseline further, too. Use its own recipe, with `model.init_from`,
# `tokenizer.path`, epochs and learning rate of the MAT.

# %%
references = list(read_lines(folder / "data" / f"test.{target_lang}"))
outputs = {run: list(read_lines(folder / run / "translations.txt")) for run in results}
comparison = compare_systems(outputs["vanilla"], outputs["mat"], references)
print(f"\n{'':<8}{'parameters':>12}{'sacreBLEU':>11}{'chrF':>8}")
for run, result in results.items():
    print(f"{run:<8}{result['parameters']:>12,}{result['test']['bleu']:>11.2f}{result['test']['chrf']:>8.2f}")
print(f"{results['mat']['test']['signature']['bleu']}\n")
for metric, tested in comparison.items():
    print(f"{metric}: {tested['difference']:+.2f}, p = {tested['p_randomization']:.4f} (approximate randomisation)")

# %% [markdown]
# The cell below draws the learning curves side by side. The steps of the MAT are counted from its own start.

# %%
curves = plot_runs({run: load_history(folder / run) for run in results}, folder / "learning_curves.png")
print(curves)
if "ipykernel" in sys.modules:
    from IPython.display import Image, display

    display(Image(filename=curves))

# %% [markdown]
# ## Translate

# %%
translator = pipeline("translation", model=str(mat.output_dir))
sentence = splits["test"]["source"][0]
translation = translator(sentence)[0]["translation_text"]
print(f"\n  {sentence}\n= {translation}\n  {splits['test']['target'][0]}  (reference)\n")

# %% [markdown]
# ## Share
#
# `share` writes a folder with the code of the model beside its weights, so that the model loads where this library is
# not installed. By default, `share` also tests this (`verify`). Here we test it ourselves, in a new process that
# cannot import the library, to show the code that other people will write.

# %%
shared = hf_deepwide.share(mat.output_dir, folder / "to-upload", overwrite=True, verify=False)
elsewhere = """
import sys
sys.modules["hf_deepwide"] = None  # as if it were not installed
from transformers import pipeline
translator = pipeline("translation", model=sys.argv[1], trust_remote_code=True)
print(translator(sys.argv[2])[0]["translation_text"])
"""
answer = subprocess.run(
    [sys.executable, "-c", elsewhere, shared, sentence], stdout=subprocess.PIPE, encoding="utf-8", check=True
)
print(f"without hf_deepwide: {answer.stdout.strip()}")

# %% [markdown]
# ## Next steps
#
# - Read the card, `to-upload/README.md`. Describe the data there, and the licence of the model.
# - Upload the model with your card: `hf auth login`, then
#   `python scripts/share.py runs/walkthrough/mat runs/walkthrough/to-upload --overwrite --repo_id you/your-model`.
# - Train larger models for longer: `scripts/recipes/` has recipes of all sizes and families. Keep the splits in
#   `data/`.
# - Score the model as other people do: `python scripts/evaluate_translation.py --help`.

# %%
print(
    f"\nall of it is in {folder}; to upload: python scripts/share.py {mat.output_dir} {shared} --overwrite "
    "--repo_id you/your-model"
)
