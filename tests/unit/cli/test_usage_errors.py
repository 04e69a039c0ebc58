"""Unknown and renamed options and commands: one line with the nearest or the new name."""

from __future__ import annotations

import pytest
import typer
from test_cli import must_refuse, qkv

from qkv import renamed
from qkv.cli.commands import app


def test_an_option_or_command_that_does_not_exist_is_one_line():
    must_refuse(qkv("predcit", "rnn"), "no command 'predcit'; did you mean 'predict'?")
    must_refuse(qkv("tokenizer", "shw", "bad"), "no command 'shw'; did you mean 'show'?")
    must_refuse(qkv("predict", "rnn", "--num-bemas", 3), "no option '--num-bemas'; did you mean '--num-beams'?")
    must_refuse(qkv("predict", "rnn", "--xyzzy"), "no option '--xyzzy'; see qkv predict --help")
    must_refuse(qkv("--verison"), "no option '--verison'; did you mean '--version'?")
    must_refuse(qkv("predict"), "Missing argument 'MODEL'; see qkv predict --help")
    must_refuse(qkv("predict", "rnn", "bad", "--n-best", "x"), "--n-best", "see qkv predict --help")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("look", "run", "bad"), "the command look is now plot"),
        (("predict", "run", "bad", "--best", "3"), "--best is now --n-best"),
        (("predict", "run", "bad", "--word=mean"), "--word is now --subword-pooling"),
        (("prompt", "run", "--data", "x.csv", "--word", "1=bad"), "--word is now --verbalizer"),
        (("tokenizer", "show", "run", "bad", "--pair", "cafe"), "--pair is now --text-pair"),
        (("import", "run", "-o", "out", "--head", "body"), "--head 'body' is now 'backbone'"),
        (("data", "build", "x.txt", "-t", "run", "-o", "out", "--format", "lines"), "is now 'line_per_document'"),
    ],
)
def test_an_old_name_is_refused_by_one_line_that_says_the_new_one(tmp_path, words, said):
    must_refuse(qkv(*words, cwd=tmp_path), said)


def test_no_command_has_an_option_under_its_old_name_and_each_new_one_is_there():
    def options(command):
        inner = getattr(command, "commands", {}).values()
        return {name for parameter in command.params for name in parameter.opts}.union(*map(options, inner))

    known = options(typer.main.get_command(app))
    assert known.isdisjoint(renamed.OPTIONS)
    assert {*renamed.OPTIONS.values(), "--verbalizer"} <= known
