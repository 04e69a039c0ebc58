"""Files that are damaged at random are read, or refused in one line: no traceback, hang, panic or flood of memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2]))
from tests.fuzz import targets
from tests.fuzz.__main__ import main, run_cases

CASES, SEED = 2000, 15


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "corpus"
    with torch.random.fork_rng():
        targets.build_corpus(folder)
    return folder


def test_every_target_is_read_while_it_is_undamaged(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for target in (target for listed in targets.list_targets(corpus).values() for target in listed):
        if target.name.startswith("progress/"):  # it would finish the run in the corpus
            continue
        monkeypatch.chdir(target.folder)
        target.operation(target.folder)


def test_every_format_has_a_sample(corpus: Path) -> None:
    from qkv.data.formats.registry import FORMATS

    names = {target.name.removeprefix("data/") for target in targets.list_targets(corpus)["data"]}
    assert names == {name for name in FORMATS.names() if not name.startswith("law ")}  # another test registers these


def test_damaged_files_are_read_or_refused_in_one_line(corpus: Path) -> None:
    results = list(run_cases(corpus, range(CASES), SEED, "", workers=1, seconds=240))
    failures = [f"{result['index']}: {result}" for result in results if result["outcome"] == "failed"]
    assert not failures, "\n".join([*failures, f"python -m tests.fuzz --seed {SEED} --only NUMBER shows a traceback"])
    outcomes = {result["outcome"] for result in results}
    assert len(results) == CASES
    assert outcomes == {"ok", "refused"}


def test_a_case_depends_on_its_seed_and_number_alone(corpus: Path, tmp_path: Path) -> None:
    from tests.fuzz.worker import pick_case, prepare

    listed = targets.list_targets(corpus)
    mutations = []
    for number in range(2):
        target, rng = pick_case(listed, 3, 17, "")
        mutations.append((target.name, prepare(target, rng, tmp_path / str(number))))
    assert mutations[0] == mutations[1]


def test_the_command_runs_a_class_and_counts_outcomes(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--cases", "20", "--class", "processor", "--workers", "1", "--corpus", str(corpus)]
    monkeypatch.setattr(sys, "argv", ["fuzz", *options])
    assert main() == 0
    assert "20 cases in" in capsys.readouterr().out
