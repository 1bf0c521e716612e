"""Whatever the locale: files are UTF-8, and a terminal gets the characters that it has."""

import ast
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from helpers.jobs import BIN, ENV, HVDTRAIN

import hvdtrain
from hvdtrain.base.formatting import PLAINER, recoded, set_encoding

# One whose encoding has the characters that are printed, with several bytes each, and one whose
# encoding lacks some.
LOCALES = {
    "ja_JP": ("EUC-JP", "euc_jp"),
    "ru_RU": ("KOI8-R", "koi8_r"),
}
needs_localedef = pytest.mark.skipif(
    not shutil.which("localedef") or not Path("/usr/share/i18n/charmaps").is_dir(),
    reason="Debian has the sources of locales in its package `locales`",
)


OF_FILES = {"mode", "buffering", "errors", "newline"}  # arguments of `open`, beside the encoding


def without_encoding(source):
    """Yields the lines where text is read or written in the locale's encoding."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        options = {keyword.arg for keyword in node.keywords}
        if "encoding" in options:
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        decodes = any(
            keyword.arg in ("text", "universal_newlines")
            and isinstance(keyword.value, ast.Constant)
            for keyword in node.keywords
        )
        asks_for_text = decodes or name in ("read_text", "write_text")
        if asks_for_text or (name == "open" and _opens_text(node, options)):
            yield node.lineno


def _opens_text(node, options):
    """Returns whether a call of `open` is of a file, by its arguments, and of text."""
    modes = [arg for arg in node.args if isinstance(arg, ast.Constant)]
    others = len(node.args) - len(modes) - isinstance(node.func, ast.Name)
    is_file = others <= 0 and options <= OF_FILES
    return is_file and not any("b" in str(mode.value) for mode in modes)


# `open` of fsspec's files, which are binary, and of what only has a method of that name
OTHER = {
    "data/parquet_files.py",
    "data/parquet_process.py",
}


def test_the_check_sees_what_it_looks_for():
    bad = [
        "p.read_text()",
        "p.write_text('x')",
        "p.open()",
        "p.open('w')",
        "open(f)",
        "open(f, 'w')",
    ]
    bad += ["run(c, text=True)", "p.open(newline='')"]
    for line in bad:
        assert list(without_encoding(line)), line
    for line in ("p.read_text(encoding='utf-8')", "p.open('rb')", "Image.open(f)", "os.open(p, 0)"):
        assert not list(without_encoding(line)), line


def test_no_text_is_in_the_locales_encoding():
    root = Path(hvdtrain.__file__).parent
    found = [
        f"{path.relative_to(root)}:{line}"
        for path in root.rglob("*.py")
        for line in without_encoding(path.read_text(encoding="utf-8"))
        if str(path.relative_to(root)) not in OTHER
    ]
    assert not found


def test_a_terminal_gets_the_characters_that_it_has():
    text = "allreduce ×2 → 1–2 …"
    assert text.encode("koi8_r", PLAINER) == b"allreduce x2 -> 1-2 ..."
    assert "犬 √".encode("latin-1", PLAINER) == b"\\u72ac sqrt "
    assert recoded(text.encode(), "UTF-8") == text.encode()
    for encoding in ("euc_jp", "big5", "euc_kr"):
        assert recoded("× 犬\n".encode(), encoding).decode(encoding) == "× 犬\n"


def test_a_stream_that_became_a_pipe_gets_its_encoding():
    """As a forked rank has it, whose parent printed to a file."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w", encoding="koi8_r") as file:
        print("before", file=file)
        os.dup2(writer, file.fileno())
        set_encoding(file, "utf-8")
        print("×2", file=file, flush=True)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert "×2" in pipe.read().decode()


class Locale:
    """A locale that is made for the test, and commands in it.

    Args:
        name: one of LOCALES.
        folder: where it is made.
    """

    def __init__(self, name: str, folder: Path) -> None:
        charmap, self.encoding = LOCALES[name]
        place = folder / f"{name}.{charmap}"
        made = ["localedef", "--no-archive", "-i", name, "-f", charmap, place]
        subprocess.run(made, check=True, capture_output=True)
        self.env = ENV | {"LOCPATH": str(folder), "LC_ALL": place.name}
        self.env.pop("PYTHONUTF8", None)
        look = "import locale; print(locale.getpreferredencoding(False))"
        found = subprocess.run(
            [BIN / "python", "-c", look], env=self.env, capture_output=True, check=True
        )
        assert found.stdout.decode().strip() == charmap

    def call(self, *words: object) -> str:
        """Returns what a command prints."""
        done = subprocess.run(
            [HVDTRAIN, *map(str, words)],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=100,
        )
        printed = done.stdout.decode(self.encoding)  # strictly
        assert done.returncode == 0 and "Traceback" not in printed, printed
        return printed


SMALL = ["--width", "0.0625", "--steps", "2", "--threads", "1"]


def assert_files_are_utf8(*folders):
    for folder in folders:
        for path in folder.rglob("*"):
            if path.suffix in (".json", ".jsonl", ".toml", ".out", ".err") or path.name == "log":
                path.read_text(encoding="utf-8")


@needs_localedef
def test_commands_work_in_a_locale_that_lacks_characters(tmp_path, few_digits):
    here, out = Locale("ru_RU", tmp_path), tmp_path / "run"
    small = [*SMALL, "--dataset", few_digits]
    job = ["launch", "-n", "2", "--out", out, "--", "--mode", "allreduce", *small]
    assert "val_accuracy" in here.call(*job)
    assert_files_are_utf8(out, out.with_name("run.launch"))
    assert "x2" in here.call("report", out, "--out", tmp_path / "report")
    assert "×" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    for command in (["doctor"], ["evaluate", out], ["launch", "--help"]):
        here.call(*command)


@needs_localedef
def test_commands_work_in_a_locale_of_several_bytes_a_character(tmp_path, few_digits):
    here, out = Locale("ja_JP", tmp_path), tmp_path / "run"
    words = ["launch", "-n", "1", "--out", out, "--", "--mode", "single", *SMALL]
    assert "val_accuracy" in here.call(*words, "--dataset", few_digits)
    assert_files_are_utf8(out, out.with_name("run.launch"))
    shown = here.call("report", out, "--out", tmp_path / "report")
    assert "×" in shown
    assert "×" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
