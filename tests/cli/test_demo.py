"""The demo without a browser: what it translates, shows and refuses."""

import base64
import html
import re
import shutil
import socket
import sys
from types import SimpleNamespace

import gradio
import httpx
import pytest
import torch
from coded_languages import KINDS
from demo_models import TEXTS, build, save
from paired_languages import build as build_pairs

from hf_deepwide import export_ctranslate2
from hf_deepwide.analysis.inside import Inside
from hf_deepwide.demo.page import (
    FAILURES,
    MOST_CHARACTERS,
    MOST_LINES,
    POLICY,
    build_page,
    launch,
    read_request,
    show_beams,
    show_inside,
    show_problem,
    show_time,
)
from hf_deepwide.demo.pictures import pictures
from hf_deepwide.demo.systems import (
    Answer,
    Beam,
    CheckpointSystem,
    Request,
    Seen,
    language_choices,
    load_systems,
    start_languages,
    words,
)
from hf_deepwide.errors import UserError
from hf_deepwide.evaluation.arguments import EvaluationArguments
from hf_deepwide.evaluation.checkpoint import load_translator
from hf_deepwide.evaluation.translate import translate
from hf_deepwide.models.language_pairs import Languages
from hf_deepwide_cli import main

EVIL = "<script>alert(1)</script> & \"<b>'"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("mat"), "mat", attention_branches=2)


@pytest.fixture(scope="module")
def system(folder):
    (system,) = load_systems([folder])
    return system


def images(shown):
    """The SVG images inside a piece of HTML."""
    return [base64.b64decode(data).decode() for data in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', shown)]


def test_translations_are_those_of_translate(system):
    request = read_request("\n".join([TEXTS[0], "", TEXTS[1]]), 3)
    answer = system.translate(request)
    expected = translate(system.model, system.tokenizer, request.lines, EvaluationArguments(num_beams=3))
    assert [beams[0].text if beams else "" for beams in answer.beams] == expected
    assert [len(beams) for beams in answer.beams] == [3, 0, 3]
    assert answer.seconds > 0
    assert "2 lines, 3 beams" in show_time(answer, request)
    assert show_beams(answer).count("<tr") == 1 + 6


def test_each_branch_is_a_panel(system):
    request = read_request(TEXTS[0], 2)
    answer = system.translate(request)
    (image,) = images(show_inside(system, request, answer, 0, layer=1))
    assert "branch 2" in image
    assert "branch 3" not in image
    assert "decoder layer 1" in show_inside(system, request, answer, 0, layer=1)
    assert "decoder layer 2" in show_inside(system, request, answer, 0, layer=None)


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("latent_depth", {"inference_selection": "hard"}, "latent depth"),
        ("multipath_transformer", {"encoder_paths": 2}, "paths"),
        ("depthwise_lstm", {}, "gates"),
    ],
)
def test_draws_the_figures_of_each_family(family, fields, said, tmp_path):
    (system,) = load_systems([save(tmp_path, family, **fields)])
    request = read_request(TEXTS[2], 2)
    shown = show_inside(system, request, system.translate(request), 0, None)
    assert len(images(shown)) == 2
    assert said in shown


def test_text_is_shown_as_text(system):
    beam = Beam(EVIL, (1,), -0.5)
    shown = show_beams(Answer(((beam,),), 0.1, (EVIL,))) + show_time(Answer((), 0.1, (EVIL,)), Request((EVIL,), 1))
    shown += show_problem(UserError(EVIL + "\nmore"))
    assert "<script" not in shown
    assert "<b>" not in shown
    assert shown.count(html.escape(EVIL)) == 3
    seen = Seen(Inside({1: torch.rand(1, 1, 1)}, {}), [EVIL], [EVIL], 0)
    (image,) = images(pictures(None, seen, None))
    assert "<script" not in image


def test_problems_are_one_line():
    assert "\n" not in show_problem(RuntimeError("a\nb\nc"))
    assert "MemoryError" in show_problem(MemoryError())


@pytest.mark.parametrize(
    ("text", "beams", "said"),
    [
        ("", 2, "Write"),
        (" \n ", 2, "Write"),
        (None, 2, "Write"),
        ("x" * (MOST_CHARACTERS + 1), 2, "characters"),
        ("a\n" * (MOST_LINES + 1), 2, "lines"),
        ("a", 0, "beams"),
        ("a", 10**9, "beams"),
    ],
)
def test_refuses_texts_and_beams_out_of_range(text, beams, said):
    with pytest.raises(UserError, match=said):
        read_request(text, beams)


def test_survives_a_bad_text(system):
    with pytest.raises(FAILURES, match="surrogate"):
        system.translate(Request(("\ud800",), 2))
    assert system.translate(Request((TEXTS[0],), 2)).beams[0]


def test_a_line_that_is_cut_is_noted(system):
    answer = system.translate(read_request(TEXTS[0] + "\n" + "dogs " * 60, 1))
    (note,) = answer.notes
    assert note.startswith("Line 2")
    assert "48" in note


@pytest.mark.parametrize("family", ["vanilla_transformer", "latent_depth"])
def test_languages_are_chosen_on_the_page(family, tmp_path):
    model, tokenizer = build_pairs(family, "source", posteriors="target" if family == "latent_depth" else "none")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (system,) = load_systems([tmp_path])
    assert language_choices(system.languages) == (["en"], ["de", "fr"])
    assert start_languages(system.languages) == ("en", "de")
    german, french = (system.translate(Request(tuple(TEXTS), 2, "en", target)).beams for target in ("de", "fr"))
    assert german != french
    request = Request(tuple(TEXTS), 2, "en", "fr")
    assert "<figure>" in show_inside(system, request, system.translate(request), 0, None)
    with pytest.raises(FAILURES, match="target language"):
        system.translate(Request(tuple(TEXTS), 2))


def test_codes_are_offered(tmp_path):
    """The page starts with the languages of the training, if the model names them."""
    make, *_, source, target, _ = KINDS["nllb"]
    trained = SimpleNamespace(trained_pairs=[f"{source}-{target}"])
    assert start_languages(Languages(trained, None, make(tmp_path))) == (source, target)
    languages = Languages(None, None, make(tmp_path))
    sources, targets = language_choices(languages)
    assert source in sources
    assert target in targets
    assert language_choices(Languages(None, None, build("mat")[1])) == ([], [])


def test_a_model_of_one_pair_says_that_languages_do_not_apply(system):
    assert system.translate(Request((TEXTS[0],), 1, "en", "fr")).notes
    assert not system.translate(Request((TEXTS[0],), 1)).notes


def test_tokens_are_spelt_for_a_reader(system):
    ids = system.tokenizer("two dogs")["input_ids"]
    assert "".join(words(system.tokenizer, ids)).replace("▁", "") == "twodogs</s>"


def test_systems_of_one_name_are_told_apart(tmp_path):
    folders = [save(tmp_path / name / "run", "vanilla_transformer") for name in "ab"]
    assert [system.name for system in load_systems(folders)] == ["a/run", "b/run"]
    with pytest.raises(UserError, match="twice"):
        load_systems([folders[0], folders[0]])


def test_the_page_is_served_by_this_machine_alone(folder):
    page = build_page([folder])
    url = launch(page)
    try:
        answer = httpx.get(url, trust_env=False)
        config = httpx.get(f"{url}config", trust_env=False).json()
        theme = httpx.get(f"{url}theme.css", trust_env=False)
    finally:
        page.close()
    assert url.startswith("http://127.0.0.1:")
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == POLICY
    assert "https:" not in POLICY
    assert config["analytics_enabled"] is False
    assert not re.search(r"url\(.?http", theme.text)
    assert all(dependency["api_visibility"] == "private" for dependency in config["dependencies"])


def test_a_missing_extra_is_one_line(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gradio", None)
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", "demo", str(folder)])
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err
    assert "pip install 'hf_deepwide[demo]'" in error
    assert error.count("\n") == 1


def test_refuses_a_broken_checkpoint_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["hf-deepwide", "demo", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.count("\n") == 1


def test_facts_name_family_and_size(system):
    assert isinstance(system, CheckpointSystem)
    assert system.facts.startswith("mat · ")
    assert "2 attention branches" in system.facts


@pytest.fixture(scope="module")
def exported(folder, tmp_path_factory):
    return export_ctranslate2(folder, tmp_path_factory.mktemp("engine") / "exported")


def test_an_exported_folder_translates_and_shows_its_attention(exported, system):
    (engine,) = load_systems([exported])
    request = read_request(f"{TEXTS[0]}\n\n{TEXTS[0]}", 3)
    answer, expected = engine.translate(request), system.translate(request)
    assert [len(beams) for beams in answer.beams] == [3, 0, 3]
    for beams, others in zip(answer.beams, expected.beams, strict=True):
        assert [beam.text for beam in beams] == [beam.text for beam in others]
        assert [beam.score for beam in beams] == pytest.approx([beam.score for beam in others], abs=1e-3)
    assert "CTranslate2" in engine.facts
    assert len(images(show_inside(engine, request, answer, 2, None))) == 1


def test_an_exported_folder_cuts_a_line_as_its_model_does(exported, system):
    (engine,) = load_systems([exported])
    request = read_request(f"{TEXTS[0]}\n{'wort ' * 400}", 2)
    assert engine.translate(request).notes == system.translate(request).notes != ()
    assert all(engine.translate(request).beams)


def test_the_engine_shows_the_first_head_of_its_last_layer(tmp_path):
    folder = save(tmp_path / "model", "vanilla_transformer")
    (engine,) = load_systems([export_ctranslate2(folder, tmp_path / "exported")])
    request = read_request(TEXTS[1], 2)
    beam = engine.translate(request).beams[0][0]
    seen = engine.look(request, 0, beam)
    model, tokenizer = load_translator(folder)
    model.set_attn_implementation("eager")
    outputs = model(
        **tokenizer(TEXTS[1], return_tensors="pt"), labels=torch.tensor([beam.ids]), output_attentions=True
    )
    expected = outputs.cross_attentions[-1][0, 0].detach()  # [T, S]
    shown = seen.inside.attention[0][0]
    torch.testing.assert_close(shown, expected[: len(shown)], atol=1e-4, rtol=1e-3)
    assert len(seen.source) == shown.shape[1]
    assert len(seen.target) == shown.shape[0]


def test_a_damaged_export_is_one_line(exported, tmp_path):
    damaged = shutil.copytree(exported, tmp_path / "damaged")
    (damaged / "model.bin").write_bytes(b"nothing")
    with pytest.raises(UserError, match="CTranslate2"):
        load_systems([damaged])


def test_an_exported_model_of_several_pairs_is_asked_for_a_language(tmp_path):
    model, tokenizer = build_pairs("vanilla_transformer", "source")
    model.generation_config.min_new_tokens = None  # with a minimum, the engine excludes </s> before it normalises
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    systems = load_systems([tmp_path / "model", export_ctranslate2(tmp_path / "model", tmp_path / "exported")])
    assert language_choices(systems[1].languages)[1] == ["de", "fr"]
    for target in ("de", "fr"):
        request = Request(tuple(TEXTS), 3, "en", target)
        firsts = [[beams[0].text[:20] for beams in system.translate(request).beams] for system in systems]
        assert firsts[0] == firsts[1]


def test_a_port_that_cannot_be_had_is_one_line():
    with pytest.raises(UserError, match="--port 99999; accepted: a number from 1 to 65535"):
        launch(None, port=99999)
    with socket.socket() as taken, gradio.Blocks() as page:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match="Give others with --port and --host"):
            launch(page, port=taken.getsockname()[1])
