"""Commands that start at once: a server imports PyTorch and Transformers once, and forks a child for each command.

    forked_commands.py serve SOCKET MODULE …       the server, which imports modules; it prints a line when it is ready
    forked_commands.py SOCKET hf-deepwide WORD …   a client: `hf-deepwide WORD …`
    forked_commands.py SOCKET -c CODE WORD …       a client: `python -c CODE WORD …`

A child has its client's folder, environment, streams and arguments. The client exits with the child's status.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

LARGEST = 1 << 17  # most bytes of a call: its arguments and its environment


@contextmanager
def serving(*modules: str, environment: dict[str, str]) -> Iterator[str]:
    """Run a server during the block, and yield its address."""
    import subprocess  # imported here, because a client starts faster without them
    import tempfile

    with tempfile.TemporaryDirectory() as folder:  # a short path: a socket's address has at most 107 characters
        address = f"{folder}/socket"
        command = [sys.executable, __file__, "serve", address, *modules]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout.readline() == "ready\n"
            yield address
            server.terminate()


def client(address: str) -> list[str]:
    """The first words of a command that the server at `address` runs."""
    return [sys.executable, "-S", "-E", __file__, address]  # without site packages, a client starts at once


def call(
    address: str, words: list[str], folder: str, environment: dict[str, str], streams: Sequence[int] = (0, 1, 2)
) -> int:
    """Have the server run a command, and return the command's exit status."""
    job = {"words": words, "folder": folder, "environment": environment}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(job).encode()], streams)
        return int(server.recv(8) or b"1")  # an empty answer: the child was killed


def run(
    address: str, code: str, *words: object, folder: str | None = None, environment: Mapping[str, str] = os.environ
) -> "subprocess.CompletedProcess[str]":
    """Have the server run `python -c CODE WORD …`, and return the exit status and the output."""
    import subprocess
    import tempfile

    command = ["-c", code, *map(str, words)]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors, open(os.devnull) as null:
        streams = [each.fileno() for each in (null, out, errors)]
        status = call(address, command, folder or os.getcwd(), dict(environment), streams)
        for each in (out, errors):
            each.seek(0)
        return subprocess.CompletedProcess(command, status, out.read(), errors.read())


def serve(address: str, modules: list[str]) -> None:
    """Answer each call in a new child process."""
    for module in modules:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: children that end need no `wait`
    gc.freeze()  # a child's garbage collector skips the imported objects, so their memory is not copied
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    os._exit(answer(client))


def answer(client: socket.socket) -> int:
    """Run a client's command, in a child of the server, and return its exit status."""
    message, streams, _, _ = socket.recv_fds(client, LARGEST, 3)
    job = json.loads(message)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    use_remote_code_in(os.environ.get("HF_MODULES_CACHE"))
    program, *words = job["words"]
    status: object = 0
    try:
        if program == "-c":
            code, *words = words
            sys.argv = ["-c", *words]
            sys.path[:1] = ["", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        else:
            from hf_deepwide_cli import main

            sys.argv = [program, *words]
            main()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    if not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    client.send(str(status).encode())
    return status


def use_remote_code_in(folder: str | None) -> None:
    """Make Transformers keep remote code in a folder: it reads the environment variable only at its import."""
    if folder is not None:
        importlib.import_module("transformers.dynamic_module_utils").HF_MODULES_CACHE = folder


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(call(sys.argv[1], sys.argv[2:], os.getcwd(), dict(os.environ)))
