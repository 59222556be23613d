"""Two processes against one: every family, replicated and sharded, random numbers, and evaluation."""

import json
import shutil
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import pytest
import scale_worker
import torch
import torch.distributed as dist
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import load_file
from scale_worker import DROPPING, FAMILIES, SENTENCES, STREAMED
from tiny_run import LAUNCH, SCRIPT, WITH_HELPERS, tiny_corpus, tiny_recipe
from transformers import AutoModelForSeq2SeqLM

from hf_deepwide.analysis.layer_joints import GATE
from hf_deepwide.data.corpora import load_parallel
from hf_deepwide.errors import UserError
from hf_deepwide.runs.recipe import load_recipe
from hf_deepwide.runs.run import run_recipe
from hf_deepwide.training.preemption import Interrupted
from hf_deepwide.training.process_group import leaving_process_group
from hf_deepwide.training.replay import replay

CONFIG = SCRIPT.parent / "accelerate" / "cpu.yaml"


@pytest.fixture(scope="module")
def corpus():
    return tiny_corpus()


@pytest.fixture(scope="module")
def together(run_code, tmp_path_factory) -> Path:
    """The folder with the results of two processes.

    The config starts them. `accelerate launch --cpu --num_processes 2` starts only one process, and so does a config
    of MULTI_CPU, because there is no MPI.
    """
    out = tmp_path_factory.mktemp("together")
    done = run_code(LAUNCH, "--config_file", CONFIG, scale_worker.__file__, "main", out, environment=WITH_HELPERS)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def reports(together) -> list[dict]:
    """The report of each process."""
    return [json.loads((together / f"report-{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1)]


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], atol: float) -> None:
    assert theirs.keys() <= ours.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=atol, msg=name)


def flat(value) -> list[float]:
    """All numbers in an entry of the log: one number, or the numbers of each layer."""
    return (
        [x for stack in value.values() for row in stack for x in flat(row)]
        if isinstance(value, dict)
        else ([x for item in value for x in flat(item)] if isinstance(value, list) else [value])
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_equal_one_that_accumulates(family, together, corpus, tmp_path):
    """Compare after six steps of Adam with clipping, label smoothing and all loss terms, replicated and sharded."""
    trainer = scale_worker.train_without_dropping(corpus, tmp_path, family, gradient_accumulation_steps=2)
    start = scale_worker.make_trainer(corpus, tmp_path, family, scale_worker.without_dropping(family))
    before, alone = (dict(each.model.named_parameters()) for each in (start, trainer))
    learnt = [name for name, parameter in alone.items() if parameter.requires_grad]
    still = [name for name in learnt if (alone[name] - before[name]).abs().max() < 1e-4]
    assert all(name.endswith("k_proj.bias") for name in still), "only what softmax cancels has not moved"
    for kind in ("two", "sharded"):
        assert_close(load_file(together / f"{kind}-{family}.safetensors"), alone, atol=1e-8)
        told = json.loads((together / f"{kind}-{family}.json").read_text(encoding="utf-8"))
        assert told["target_tokens"] == trainer.throughput.state()["args"]["target_tokens"]
        assert len(told["log"]) == len(trainer.state.log_history) > 2
        for ours, theirs in zip(told["log"][:-1], trainer.state.log_history[:-1], strict=True):
            assert ours.keys() == theirs.keys()
            own = {"tokens_per_second", "data_share"}  # depend on the clock
            own |= {key for key in ours if key.startswith(GATE)}  # depend on each process's last batch
            for key in ours.keys() - own:
                assert flat(ours[key]) == pytest.approx(flat(theirs[key]), rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize(("family", "where"), scale_worker.SHORT)
def test_memory_that_runs_out_in_one_process(family, where, together, reports, corpus, tmp_path):
    """Only this process splits its batches. Both synchronize as often, even if DDP already waited for gradients."""
    assert [report["short of memory"][f"{family}-{where}"] for report in reports] == [[], [1]]
    training = {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
    alone = scale_worker.make_trainer(corpus, tmp_path, family, scale_worker.without_dropping(family), **training)
    alone.train()
    ours = load_file(together / f"short-{family}-{where}.safetensors")
    assert_close(ours, dict(alone.model.named_parameters()), atol=1e-8)


@pytest.mark.parametrize("kind", scale_worker.KINDS)
def test_whole_runs_of_two_processes_are_those_of_one(kind, reports, tmp_path):
    """Runs of several language pairs, with BPE-dropout, and of masked language models."""
    alone = scale_worker.run_of(kind, tmp_path, gradient_accumulation_steps=2)
    for report in reports:
        assert report["runs"][kind]["tokens"] == alone["tokens"]
        assert report["runs"][kind]["validation"] == pytest.approx(alone["validation"], rel=1e-4)


def test_a_sharded_run_is_resumed_exactly(together):
    """Resume from a sharded checkpoint in mid-epoch, with dropout. The final model is the mean of checkpoints."""
    run, before = together / "sharded", together / "sharded-before"
    for name in ("checkpoint-8/model.safetensors", "model.safetensors"):
        again, once = load_file(run / name), load_file(before / name)
        assert [each for each in once if not torch.equal(once[each], again[each])] == []
    means = load_file(run / "model.safetensors")
    parts = [load_file(run / f"checkpoint-{step}" / "model.safetensors") for step in (4, 8)]
    assert_close(means, {name: (parts[0][name] + parts[1][name]) / 2 for name in means}, atol=1e-7)
    assert json.loads((run / "results.json").read_text(encoding="utf-8"))["train"]["processes"] == 2


def test_a_sharded_run_goes_on_with_another_number_of_processes(run_code, together):
    """No process draws its own random numbers, so one process ends as two do, sharded or replicated."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    alone = f"import runpy; runpy.run_path({scale_worker.__file__!r}, run_name='__main__')"
    done = run_code(alone, "go_on_alone", together / "sharded-pairs", environment=WITH_HELPERS | group)
    assert done.returncode == 0, done.stderr
    runs = ("sharded-pairs/run", "sharded-pairs/run-before", "pairs/run-before")
    again, sharded, replicated = (load_file(together / run / "model.safetensors") for run in runs)
    assert again.keys() == sharded.keys() == replicated.keys()  # tied weights are saved once
    assert_close(again, replicated, atol=1e-4)
    assert_close(sharded, replicated, atol=1e-4)


def test_what_cannot_be_sharded_is_refused(reports):
    for report in reports:
        assert report["refused"]["layers"].startswith("model.layer_drop: processes skip different layers")


def test_a_run_goes_on_sharded_only_if_it_began_so(together, reports, tmp_path):
    for report in reports:
        assert "checkpoint-3 holds no shards" in report["refused"]["going on"]
    run = tmp_path / "run"
    shutil.copytree(together / "sharded", run, ignore=shutil.ignore_patterns("*-8", "results.json"))
    recipe = load_recipe(run / "recipe.yaml", ["--training.gradient_accumulation_steps", "2"])
    with pytest.raises(UserError, match=r"checkpoint-4 holds shards.*distributed_type: FSDP"):
        run_recipe(recipe)


def test_sharding_needs_gpus(corpus, tmp_path, monkeypatch):
    """Without the error, accelerate would train unsharded without any message."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=r"accelerate shards on GPUs only.*use_cpu: true"):
        scale_worker.make_trainer(corpus, tmp_path, "vanilla_transformer", {})


def test_shards_convert_to_one_file(together, tmp_path):
    """Accelerate's own tool converts them. The result equals the file beside the shards, which Transformers loads."""
    checkpoint = together / "sharded" / "checkpoint-4"
    merge_fsdp_weights(str(checkpoint / "pytorch_model_fsdp_0"), str(tmp_path), safe_serialization=True)
    merged, whole = load_file(tmp_path / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert [name for name in whole if not torch.equal(whole[name], merged[name])] == []
    model = AutoModelForSeq2SeqLM.from_pretrained(checkpoint)
    assert all(torch.equal(tensor, merged[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("family", DROPPING)
def test_each_process_drops_and_draws_for_itself(family, together, reports):
    ours, theirs = (report["draws"][family] for report in reports)
    assert len(ours) == len(theirs) == 12
    assert all(one != two for one, two in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", DROPPING)
def test_what_is_drawn_follows_from_the_seed(family, together):
    once, again = (load_file(together / f"{name}-{family}.safetensors") for name in ("drop", "again"))
    assert [name for name in once if not torch.equal(once[name], again[name])] == []


@pytest.mark.parametrize("family", ["vanilla_transformer", "mat"])
def test_recomputing_activations_draws_the_same(family, together):
    """Gradient checkpointing with LayerDrop, and with dropped branches, under DistributedDataParallel."""
    plain, recomputed = (load_file(together / f"{name}-{family}.safetensors") for name in ("drop", "recomputed"))
    assert_close(recomputed, plain, atol=1e-12)


def test_each_sentence_is_scored_once(reports, corpus, tmp_path):
    """Test also an odd number of sentences, and a single sentence, which leaves one process without any."""
    alone = scale_worker.evaluate(corpus, tmp_path)
    evaluations = [report["evaluation"] for report in reports]
    shares = [evaluation["translated"] for evaluation in evaluations]
    assert sorted(len(share) for share in shares) == [SENTENCES // 2, SENTENCES // 2 + 1]
    assert sorted(shares[0] + shares[1]) == sorted(alone["sources"])
    for evaluation in evaluations:
        assert evaluation["eval_bleu"] == alone["eval_bleu"]
        assert evaluation["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)
        assert evaluation["one"] == alone["one"]


@pytest.mark.parametrize("kind", ["faults", "sharded-faults"])
def test_fault_in_one_process_stops_all(kind, together, reports, corpus, tmp_path):
    """Skip two steps, one of them with a finite gradient, exactly as one process with all the batches does."""
    alone, _ = scale_worker.train_with_faults(
        corpus, tmp_path, {5: "gradient", 13: "loss"}, on_nonfinite="skip", gradient_accumulation_steps=4
    )
    ours, theirs = (load_file(together / f"{kind}-skip-{rank}.safetensors") for rank in (0, 1))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert_close(ours, dict(alone.model.named_parameters()), atol=1e-8)
    for report in reports:
        assert (report[kind]["skip"], report[kind]["made"]) == ("", [4])
        assert report[kind]["log"][0]["skipped_steps"] == 2
    loss, expected = (log[0]["loss"] for log in (reports[0][kind]["log"], alone.state.log_history))
    assert loss == pytest.approx(expected, rel=1e-2), "of the steps left out the log has no part on either side"


@pytest.mark.parametrize("kind", ["faults", "sharded-faults"])
def test_all_processes_stop_and_save_what_they_had(kind, together, reports, corpus):
    """All stop at the same step. They save the weights before it, and every process's batches for the replay."""
    one, other = (report[kind]["stop"] for report in reports)
    assert one == other
    assert one.startswith("step 2 (epoch 0.")
    assert "the loss is nan in batch 1 of 2 of process 1; " in one
    folder = together / f"{kind}-stop" / "faults" / "step-2"
    report = json.loads((folder / "fault.json").read_text(encoding="utf-8"))
    assert [(batch["rank"], batch["loss"] == "nan") for batch in report["batches"]] == [
        (0, False), (0, False), (1, True), (1, False),
    ]  # fmt: skip
    saved = load_file(folder / "model.safetensors")
    for rank in (0, 1):
        assert_close(saved, load_file(together / f"{kind}-stop-{rank}.safetensors"), atol=0)
        batches = [batch for batch in report["batches"] if batch["rank"] == rank]
        for batch, loss in zip(batches, replay(folder, rank).losses, strict=True):
            assert batch["loss"] == "nan" or loss == pytest.approx(float(batch["loss"]))
        ids = load_file(folder / f"rank-{rank}.safetensors")
        for number, batch in enumerate(batches):
            sources = corpus.tokenizer.batch_decode(ids[f"{number}.inputs.input_ids"], skip_special_tokens=True)
            assert [pair["source"] for pair in batch["sentences"]] == sources != []


def test_processes_share_a_stream(reports, tmp_path):
    """In each pass, one process reads each sentence, also if their number is odd. Resuming is exact bit for bit."""
    texts = load_parallel(tiny_recipe(tmp_path).data, "train").select(range(STREAMED))
    expected = Counter(f"{source}\t{target}" for source, target in zip(texts["source"], texts["target"], strict=True))
    streams = [report["stream"] for report in reports]
    assert [stream["weights"] for stream in streams] == [True, True]
    whole, seen = [], Counter()
    for step in zip(*(stream["once"] for stream in streams), strict=True):
        seen.update(pair for batch in step for pair in batch)
        if seen.total() >= STREAMED:
            whole.append(seen == expected)
            seen = Counter()
    assert whole == [True, True]
    for stream in streams:
        assert stream["again"] == stream["once"][13:]
        assert len(stream["again"]) == 5


@pytest.mark.parametrize(("family", "looked_for"), [("mat", False), ("marian", None)])
def test_unused_parameters_are_looked_for_where_there_may_be_some(family, looked_for, corpus, tmp_path):
    """In our families, skipped parts get zero gradients, as the runs with dropping show. None: the Trainer decides."""
    trainer = scale_worker.make_trainer(corpus, tmp_path, family, {})
    assert trainer.args.ddp_find_unused_parameters is looked_for


@pytest.mark.parametrize(("end", "left"), [(None, True), (Interrupted(15), True), (ValueError("one process"), False)])
def test_a_group_is_left_by_all_or_by_none(end, left):
    """After an error, a process does not leave the group: it would wait for the others, and they for this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with nullcontext() if end is None else pytest.raises(type(end)), leaving_process_group():
            if end is not None:
                raise end
        assert dist.is_initialized() is not left
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
