"""The configs in `scripts/accelerate`, through accelerate's launcher. `cpu.yaml` starts test_scale_processes.py."""

import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env
from tiny_run import ENVIRONMENT, LAUNCH, SCRIPT

CONFIGS = SCRIPT.parent / "accelerate"
# The tests only need to know that each process is one of several, and that they can communicate.
COUNT = """
import sys, torch
from accelerate import PartialState
state = PartialState(cpu=True)
total = torch.ones(1)
torch.distributed.all_reduce(total)
with open(f"{sys.argv[1]}/{state.process_index}", "w") as file:
    file.write(str(int(total)))
state.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def launched(config: str, *options: str):
    """The arguments that accelerate makes from a config and from options on the command line."""
    arguments = ["--config_file", str(CONFIGS / config), *options, "train.py"]
    args, _, _ = launch._validate_launch_command(launch.launch_command_parser().parse_args(arguments))
    return args


@pytest.mark.parametrize("path", sorted(CONFIGS.iterdir()), ids=lambda path: path.name)
def test_accelerate_reads_the_config(path):
    """Accelerate must know each key, and keep its type. Precision is "no", because the recipe sets it."""
    config = load_config_from_file(str(path))
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key, value in given.items():
        assert getattr(config, key) == (DistributedType(value) if key == "distributed_type" else value)
    assert given["mixed_precision"] == "no"
    args = launched(path.name, "--main_process_ip", "127.0.0.1")
    known = vars(launch.launch_command_parser().parse_args(["train.py"]))
    assert args.config_file == str(path)
    for key, value in given.get("fsdp_config", {}).items():
        assert key in known, key
        assert str(getattr(args, key)) == str(value)


def test_what_starts_how_many():
    assert not launched("one_gpu.yaml").multi_gpu
    assert prepare_env("cpu.yaml")[0].nproc_per_node == "2"
    assert prepare_env("ddp.yaml", "--num_processes", "3")[0].nproc_per_node == "3"
    nodes, _ = prepare_env(
        "several_nodes.yaml", "--num_machines", "4", "--num_processes", "32", "--machine_rank", "3",
        "--main_process_ip", "10.0.0.1",
    )  # fmt: skip
    assert (nodes.nnodes, nodes.nproc_per_node, nodes.node_rank) == ("4", "8", 3)
    assert (nodes.rdzv_backend, nodes.rdzv_endpoint) == ("static", "10.0.0.1:29500")
    args, environment = prepare_env("fsdp2.yaml")
    assert (args.use_fsdp, args.nproc_per_node) == (True, "8")
    expected = {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
        "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    }  # fmt: skip
    assert {name: environment[name].replace("True", "true") for name in expected} == expected


def prepare_env(config: str, *options: str):
    """The arguments of torch's launcher, and the environment that it gives the processes."""
    args = launched(config, *options)
    return args, prepare_multi_gpu_env(args)


def test_nodes_find_each_other(run_code, tmp_path):
    """Start two nodes on this machine, each with its own launcher."""
    (tmp_path / "count.py").write_text(COUNT, encoding="utf-8")
    options = ["--num_processes", "2", "--main_process_port", str(free_port())]
    options += ["--config_file", CONFIGS / "several_nodes.yaml", "--main_process_ip", "127.0.0.1"]

    def launch_node(node: int) -> subprocess.CompletedProcess:
        words = [*options, "--machine_rank", node, tmp_path / "count.py", tmp_path]
        return run_code(LAUNCH, *words, environment=ENVIRONMENT)

    with ThreadPoolExecutor() as pool:
        for launcher in pool.map(launch_node, range(2)):  # at the end, the launchers wait 300 s for each other
            assert launcher.returncode == 0, launcher.stderr
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("[0-9]")} == {"0": "2", "1": "2"}
