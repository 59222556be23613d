"""Commands without their start, most of which imports PyTorch and Transformers: a server forks a child for each.

    forked_commands.py serve SOCKET                the server; it prints a line when it can be called
    forked_commands.py SOCKET hf-deepwide WORD …   a client: `hf-deepwide WORD …`
    forked_commands.py SOCKET -c CODE              a client: `python -c CODE`

A child has the folder, the environment, the streams and the words of its client, which ends with the child's status.
"""

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback

LARGEST = 1 << 17  # bytes of a call: its words and its environment


def call(address: str, words: list[str]) -> int:
    """Have the server run a command; returns its exit status."""
    job = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(job).encode()], [0, 1, 2])
        return int(server.recv(8) or b"1")  # nothing: the child was killed


def serve(address: str) -> None:
    """Answer calls, each in a child of its own."""
    importlib.import_module("hf_deepwide.runs.run")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that have ended are gone
    gc.freeze()  # a child need not look at what is imported, nor copy it
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
    """Run the command of a client, in a child of the server."""
    from hf_deepwide_cli import main

    message, streams, _, _ = socket.recv_fds(client, LARGEST, 3)
    job = json.loads(message)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    program, *words = job["words"]
    status: object = 0
    try:
        if program == "-c":
            sys.argv = ["-c"]
            exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
        else:
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


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(call(sys.argv[1], sys.argv[2:]))
