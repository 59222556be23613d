"""The demo page: it shows the translations of a text by all systems side by side, and pictures of their insides."""

import html
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ..errors import UserError, need, number_of, one_line
from ..evaluation import translate
from .pictures import pictures
from .systems import Answer, Request, System, language_choices, load_systems, start_languages

logger = logging.getLogger(__name__)

MOST_LINES = 20
MOST_CHARACTERS = 4000
MOST_BEAMS = 10
MOST_WAITING = 20  # requests of all readers together; further requests are refused
SHOWN = 60  # characters that are shown of a line in the list of lines
FAILURES = (ValueError, RuntimeError, LookupError, MemoryError)  # errors that models, engines and tokenizers raise
# The page loads everything from its own server, even if a component would load files from elsewhere.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval' blob:; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; worker-src 'self' blob:; connect-src 'self' data: blob:"
)
CSS = """
.results { gap: 24px; }
.system h2 { margin: 0; font-size: 1.25rem; overflow-wrap: anywhere; }
.facts, .pictures figcaption { color: var(--body-text-color); opacity: 0.75; margin: 0; }
.problem { color: #b91c1c !important; background: #fef2f2; border-left: 4px solid #dc2626; margin: 0;
  padding: 8px 12px; }
.note { margin: 4px 0 0; }
.beams { border-collapse: collapse; width: 100%; margin: 0 !important; }
.beams, .beams thead, .beams tbody, .beams tr { border: none !important; }
.beams th, .beams td { text-align: left; vertical-align: top; padding: 3px 8px; overflow-wrap: anywhere;
  border: none !important; border-bottom: 1px solid var(--border-color-primary) !important; }
.beams tr.first td { border-top: 2px solid var(--border-color-primary) !important; }
.beams td.number, .beams th.number { text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums; width: 1%; }
.pictures figure { margin: 0 0 16px; }
.pictures img { display: block; max-width: 100%; height: auto; background: white; }
.pictures figcaption { margin-top: 4px; }
"""


def serve(models: Sequence[str | os.PathLike], host: str | None = None, port: int | None = None) -> None:
    """Serve the page until the process is interrupted.

    Args:
        models: folders of runs or checkpoints, folders exported to CTranslate2, or Hub ids.
        host: the address to listen on. None: the environment's GRADIO_SERVER_NAME, else this machine alone.
        port: the port to listen on. None: the environment's GRADIO_SERVER_PORT, else the first free port from 7860.

    Raises:
        UserError: Gradio is not installed, a model cannot be loaded, or the port is taken.
    """
    counts = logging.getLogger(translate.__name__)
    level = counts.level
    counts.setLevel(logging.WARNING)  # it would log the number of sentences of each request
    try:
        page = build_page(models)
        url = launch(page, host, port)
        print(f"{url} shows the page; Ctrl+C ends it", flush=True)
        page.block_thread()
    finally:
        counts.setLevel(level)


def launch(page: Any, host: str | None = None, port: int | None = None) -> str:
    """Start the page's server in the background, and return its local address.

    Raises:
        UserError: the server cannot listen at this address, or `port` is out of range.
    """
    if port is not None and not 1 <= port <= 65535:
        raise UserError(f"demo: --port {port}; accepted: a number from 1 to 65535")
    gradio = _gradio()
    from starlette.middleware import Middleware

    # the page stores no requests; Gradio before 6.24 has no history and no such argument
    unkept = {"run_history": False} if "run_history" in inspect.signature(page.launch).parameters else {}
    fonts = ["ui-sans-serif", "system-ui", "sans-serif"]
    try:
        _, url, _ = page.launch(
            server_name=host,
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            ssr_mode=False,
            pwa=False,
            mcp_server=False,
            enable_monitoring=False,
            **unkept,
            footer_links=[],
            max_file_size=1,
            state_session_capacity=200,
            theme=gradio.themes.Default(font=fonts, font_mono=["ui-monospace", "monospace"]),
            css=CSS,
            app_kwargs={"middleware": [Middleware(_OwnPolicy)]},
        )
    except OSError as error:
        raise UserError(
            f"demo: nothing can listen on {host or 'this machine'}, port {port or '7860 and above'}: another program "
            "may have the port, or the host is no address of this machine. Give others with --port and --host"
        ) from error
    return url


def build_page(models: Sequence[str | os.PathLike]) -> Any:
    """Load the models and return the page, a `gradio.Blocks`; see `serve`."""
    gradio = _gradio()
    return _build(gradio, load_systems(models))


def read_request(text: str, beams: float, source_lang: str | None = None, target_lang: str | None = None) -> Request:
    """Check a reader's input, and return it as a request.

    Raises:
        UserError: there is no text or too much text, or the number of beams is out of range.
    """
    text = text if isinstance(text, str) else ""
    if len(text) > MOST_CHARACTERS:
        raise UserError(f"The text has {len(text):,} characters; at most {MOST_CHARACTERS:,} are translated at once.")
    lines = tuple(line.strip() for line in text.strip().splitlines())
    if not lines:
        raise UserError("Write a text first, one sentence a line.")
    if len(lines) > MOST_LINES:
        raise UserError(f"The text has {len(lines)} lines; at most {MOST_LINES} are translated at once.")
    if not 1 <= beams <= MOST_BEAMS:
        raise UserError(f"The number of beams is {one_line(beams)}; accepted: 1 to {MOST_BEAMS}.")
    return Request(lines, int(beams), source_lang or None, target_lang or None)


def show_time(answer: Answer, request: Request) -> str:
    """Return the time that a system took, and its notes, as HTML."""
    count = sum(bool(beams) for beams in answer.beams)
    search = "greedy search" if request.beams == 1 else f"{request.beams} beams"
    text = f"{answer.seconds:.2f} s for {number_of(count, 'line')}, {search}"
    notes = "".join(f'<p class="note">{html.escape(note)}</p>' for note in answer.notes)
    return f'<p class="facts time">{html.escape(text)}</p>{notes}'


def show_beams(answer: Answer) -> str:
    """Return all beams of each line with their scores, as HTML."""
    rows = []
    for number, beams in enumerate(answer.beams, start=1):
        for rank, beam in enumerate(beams, start=1):
            score = "" if beam.score is None else f"{beam.score:.3f}"
            first = ' class="first"' if rank == 1 else ""
            rows.append(
                f'<tr{first}><td class="number">{number if rank == 1 else ""}</td><td class="number">{score}</td>'
                f'<td dir="auto">{html.escape(beam.text)}</td></tr>'
            )
    head = '<tr><th class="number">line</th><th class="number">score</th><th>translation</th></tr>'
    return f'<table class="beams"><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table>'


def show_problem(error: BaseException) -> str:
    """Return an error message as one line of HTML."""
    message = one_line(error) or type(error).__name__
    return f'<p class="problem" role="alert">{html.escape(message)}</p>'


def show_inside(system: System, request: Request, answer: Answer, line: int, layer: int | None) -> str:
    """Return pictures of what a system did with line number `line`, counted from 0, as HTML."""
    beams = answer.beams[line]
    return (
        pictures(system.model, system.look(request, line, beams[0]), layer) if beams else "<p>The line is empty.</p>"
    )


def _gradio() -> ModuleType:
    """Import Gradio, with its usage reports turned off.

    Raises:
        UserError: Gradio is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # Gradio reads it when it is imported, and again later
    return need("gradio", "demo", "the demo")


class _OwnPolicy:
    """Middleware that sends `POLICY` with every response."""

    def __init__(self, app: Callable) -> None:
        self.app = app

    async def __call__(self, scope: dict, receive: Callable, send: Callable) -> None:
        async def send_with_policy(message: dict) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", POLICY.encode())]
            await send(message)

        await self.app(scope, receive, send_with_policy)


def _build(gradio: ModuleType, systems: Sequence[System]) -> Any:
    """Build the page for loaded systems."""
    several = [system for system in systems if system.languages.several]
    choices = [sorted({code for s in several for code in language_choices(s.languages)[side]}) for side in (0, 1)]
    begin = start_languages(several[0].languages) if several else (None, None)
    turn = {"concurrency_id": "turn", "concurrency_limit": 1, "api_visibility": "private"}  # for undisturbed times

    with gradio.Blocks(title="Translate and look inside", analytics_enabled=False, fill_width=True) as page:
        gradio.Markdown("# Translate, and look inside")
        text = gradio.Textbox(
            label=f"Text, one sentence a line (at most {MOST_LINES} lines)", lines=4, max_lines=12, elem_id="text",
            placeholder="Write or paste sentences here", autofocus=True,
        )  # fmt: skip
        with gradio.Row(equal_height=True):
            source, target = (
                gradio.Dropdown(
                    [("as saved", ""), *codes],
                    value=value or "",
                    label=label,
                    visible=bool(codes),
                    elem_id=label.lower(),
                )
                for label, codes, value in zip(("From", "To"), choices, begin, strict=True)
            )
            beams = gradio.Slider(1, MOST_BEAMS, 4, step=1, label="Beams", elem_id="beams", scale=2)
            button = gradio.Button("Translate", variant="primary", elem_id="translate", scale=1)
        status = gradio.HTML(elem_id="status")
        request = gradio.State(None, time_to_live=3600)

        answers, outputs, insides, layers = [], [], [], []
        with gradio.Row(elem_classes="results"):
            for number, system in enumerate(systems, start=1):
                with gradio.Column(min_width=320, elem_classes="system", elem_id=f"system-{number}"):
                    gradio.HTML(f'<h2>{html.escape(system.name)}</h2><p class="facts">{html.escape(system.facts)}</p>')
                    result = gradio.Textbox(
                        label="Translation", lines=4, max_lines=MOST_LINES, interactive=False, buttons=["copy"]
                    )
                    took = gradio.HTML()
                    with gradio.Accordion("All beams (score: log-probability / length ^ length_penalty)"):
                        other = gradio.HTML(max_height=360)
                    answers.append(gradio.State(None, time_to_live=3600))
                    outputs.append((result, took, other))
        with gradio.Group(visible=False) as chooser:
            line = gradio.Dropdown([], label="Look inside at line", type="index", elem_id="line", filterable=False)
        with gradio.Row(elem_classes="results"):
            for number, system in enumerate(systems, start=1):
                with gradio.Column(min_width=320, elem_id=f"inside-{number}"):
                    count = getattr(getattr(system.model, "config", None), "decoder_layers", 0)
                    layers.append(
                        gradio.Dropdown(
                            [(f"decoder layer {layer}", layer) for layer in range(1, count + 1)],
                            value=count or None,
                            label=f"Attention of {system.name}",
                            filterable=False,
                            visible=False,
                        )
                    )
                    insides.append(gradio.HTML(elem_classes="pictures"))

        def begin_request(*given: Any) -> Any:
            """Check the request, and clear the earlier results on the page."""
            cleared = [None, "", "", ""] * len(systems) + [""] * len(systems)
            try:
                asked = read_request(*given)
            except UserError as error:
                return [show_problem(error), None, gradio.skip(), gradio.skip(), *cleared]
            named = [f"{n}: {line[:SHOWN]}{'…' * (len(line) > SHOWN)}" for n, line in enumerate(asked.lines, start=1)]
            lines = gradio.update(choices=named, value=named[0])
            return ["", asked, gradio.update(visible=len(named) > 1), lines, *cleared]

        def answer_request(system: System) -> Callable:
            def answer(asked: Request | None) -> Any:
                if asked is None:
                    return None, "", "", ""
                try:
                    made = system.translate(asked)
                except FAILURES as error:
                    logger.warning("%s: %s", system.name, one_line(error))
                    return None, "", show_problem(error), ""
                translation = "\n".join(beams[0].text if beams else "" for beams in made.beams)
                return made, translation, show_time(made, asked), show_beams(made)

            return answer

        def look_inside(system: System) -> Callable:
            def look(asked: Request | None, answer: Answer | None, line: int | None, layer: int | None) -> Any:
                count = getattr(getattr(system.model, "config", None), "decoder_layers", 0)
                if asked is None or answer is None:
                    return "", gradio.update(visible=False)
                place = line if isinstance(line, int) and 0 <= line < len(answer.beams) else 0
                try:
                    return show_inside(system, asked, answer, place, layer), gradio.update(visible=count > 1)
                except FAILURES as error:
                    logger.warning("%s: %s", system.name, one_line(error))
                    return show_problem(error), gradio.update(visible=False)

            return look

        cleared = [part for answer, output in zip(answers, outputs, strict=True) for part in (answer, *output)]
        started = gradio.on(
            [button.click, text.submit], begin_request, [text, beams, source, target],
            [status, request, chooser, line, *cleared, *insides], **turn,
        )  # fmt: skip
        for system, answer, output, inside, layer in zip(systems, answers, outputs, insides, layers, strict=True):
            translated = started.then(answer_request(system), request, [answer, *output], **turn)
            look = look_inside(system), [request, answer, line, layer], [inside, layer]
            translated.then(*look, **turn)
            line.input(*look, **turn)
            layer.input(*look, **turn)
    page.queue(max_size=MOST_WAITING)
    return page
