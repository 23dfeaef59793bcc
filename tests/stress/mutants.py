"""Break the core one expression at a time, and check that a test fails each time.

``python -m tests.stress.mutants`` (``make mutants``) changes one operator, constant, condition, returned value or call
in a copy of the repository and runs the tests that guard the file. Each mutant is tested in a fork of a process that
has imported PyTorch and Lightning already, so that most take a few seconds. A mutant that no test notices must be
listed in ``mutants.yaml`` with a reason; the command fails if one is not.

Results are appended to ``--out``. A mutant is tested again only if its file changed or, if it survived, its tests did.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import copy
import hashlib
import importlib
import importlib.util
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
ACCEPTED = Path(__file__).with_name("mutants.yaml")

LAWS = "tests/test_laws.py --deselect tests/test_laws.py::TestSameGradient::test_several_processes"
RESUME = "tests/test_resume.py::test_from_every_step tests/test_resume.py::test_several_resumes_across_epochs"
PARTS = (
    "tests/losses/test_parts.py tests/parity/test_verl.py -k 'not named and not extreme and not add_up'",
    "tests/losses/test_parts.py -k 'named or extreme or add_up'",
)
GUARDS: dict[str, tuple[str, ...]] = {
    "lgrpo/functional/": ("tests/functional lgrpo/functional", "tests/losses/test_parts.py::TestEquivalences"),
    "lgrpo/functional/sync_cycle.py": ("lgrpo/functional", LAWS),
    "lgrpo/functional/random.py": ("lgrpo/functional tests/engines/test_transformers.py",),
    "lgrpo/contexts.py": ("lgrpo/contexts.py tests/engines/test_dropped_observations.py -k 'lgrpo or batch or rows'",),
    "lgrpo/policy/sequences.py": ("tests/engines/test_dropped_observations.py -k 'sequences or rows or loop'",),
    "lgrpo/losses/": PARTS,
    "lgrpo/advantages/": PARTS,
    "lgrpo/data/": ("tests/data/test_micro_batches.py tests/test_types.py", LAWS, "tests/data/test_prompts.py", RESUME),
    "lgrpo/data/datamodule.py": (
        "tests/test_errors.py tests/data/test_micro_batches.py tests/callbacks/test_improvement_monitor.py",
        LAWS,
        RESUME,
    ),
    "lgrpo/data/collate.py": ("tests/data/test_collate.py tests/data/test_micro_batches.py", LAWS),
    "lgrpo/data/kept.py": ("tests/test_truncated.py -m 'not slow'",),
    "lgrpo/data/late.py": ("tests/data/test_scoring.py",),
    "lgrpo/data/scorer.py": ("tests/data/test_scoring.py",),
    "lgrpo/data/prompts.py": ("tests/data/test_prompts.py", LAWS),
    "lgrpo/data/difficulty.py": ("tests/data/test_prompts.py",),
    "lgrpo/data/evaluation.py": (
        "tests/data/test_evaluation.py -k 'not two_processes and not waits_for_scores'",
        "tests/callbacks/test_callbacks.py",
    ),
    "lgrpo/callbacks/weight_sync.py": (LAWS, "tests/test_errors.py", RESUME),
    "lgrpo/engines/base.py": ("tests/engines/test_transformers.py", LAWS, RESUME),
    "lgrpo/engines/completions.py": ("tests/engines/test_completions.py tests/engines/test_transformers.py",),
    "lgrpo/engines/manifest.py": ("tests/engines/test_manifest.py tests/engines/test_transformers.py",),
    "lgrpo/engines/servers/balancer.py": ("tests/engines/servers/test_balancer.py",),
    "lgrpo/engines/transformers.py": ("tests/engines/test_transformers.py", "tests/test_laws.py::TestLag"),
}
"""Arguments of pytest for the files below a path, in the order in which they run; the longest path counts."""
LEFT_OUT = ("lgrpo/functional/checksum_kernel.py",)  # needs a GPU
PRELOADED = (
    "datasets",
    "hypothesis",
    "jsonargparse",
    "lightning.pytorch.cli",
    "peft",
    "pytest",
    "torch",
    "torchmetrics",
    "transformers.models.qwen2.modeling_qwen2",
)

BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change of one file."""

    file: str
    line: str
    """Text of the line where the change begins."""
    change: str
    """Source before and after."""
    number: int
    """Number of the line, which shifts when the file changes; not part of the identity."""
    start: int
    end: int
    """Bytes of the source to replace."""
    new: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.line, self.change

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.change}"

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield changed copies of a node."""
    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in BINARY:
            changed = copy.deepcopy(node)
            changed.op = BINARY[type(op)]()
            yield changed
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                changed = copy.deepcopy(node)
                changed.ops[index] = COMPARISONS[type(op)]()
                yield changed
        case ast.BoolOp(op=op):
            changed = copy.deepcopy(node)
            changed.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield changed
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            if not isinstance(operand, ast.Constant):  # the number itself is changed
                yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare):
            yield ast.UnaryOp(ast.Not(), test)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()):
            yield ast.Pass()


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all nodes inside that decide what the code does: no annotations, messages or decorators."""
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom():
            return
        case ast.keyword(arg="strict" | "stacklevel"):  # zip's own assertion, and part of a message
            return
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="warnings")))):
            return
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [value for value in (*node.args.defaults, *node.args.kw_defaults) if value is not None]
            inside: Sequence[ast.AST] = [*defaults, *node.body]
        case ast.ClassDef():
            inside = node.body
        case ast.AnnAssign():
            inside = [node.value] if node.value is not None else []
        case _:
            yield node
            inside = list(ast.iter_child_nodes(node))
    for child in inside:
        yield from parts(child)


def mutants(file: str, source: bytes) -> list[Mutant]:
    """Return all mutants of a file."""
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for node in parts(ast.parse(source)):
        replaced = node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else node
        for changed in changes(node):
            start = starts[replaced.lineno - 1] + replaced.col_offset
            end = starts[replaced.end_lineno - 1] + replaced.end_col_offset
            new = ast.unparse(changed)
            new = f"({new})" if isinstance(changed, ast.expr) else new
            before = " ".join(source[start:end].decode().split())
            line = lines[replaced.lineno - 1].decode().strip()
            change = f"{before} → {new}"
            found.append(
                Mutant(file=file, line=line, change=change, number=replaced.lineno, start=start, end=end, new=new)
            )
    return found


def all_mutants(root: Path) -> list[Mutant]:
    """Return the mutants of all guarded files."""
    paths = sorted(
        {path for name in GUARDS for path in ([root / name] if name.endswith(".py") else (root / name).rglob("*.py"))}
    )
    files = [path.relative_to(root).as_posix() for path in paths]
    return [
        mutant
        for file in files
        if file not in LEFT_OUT and not file.endswith("__init__.py")
        for mutant in mutants(file, (root / file).read_bytes())
    ]


def guards(file: str) -> tuple[str, ...]:
    """Return the tests that guard a file."""
    return GUARDS[max((path for path in GUARDS if file.startswith(path)), key=len)]


ANY = "any change"


def accepted() -> dict[tuple[str, str, str], str]:
    """Return the accepted survivors and the reason of each; an entry without changes accepts any change of its line."""
    rows = yaml.safe_load(ACCEPTED.read_text(encoding="utf-8")) or []
    return {(row["file"], row["line"], change): row["reason"] for row in rows for change in row.get("changes", [ANY])}


def gone(found: Sequence[Mutant]) -> list[tuple[str, str, str]]:
    """Return the accepted survivors that are not among all mutants: their line has changed."""
    existing = {mutant.key for mutant in found} | {(mutant.file, mutant.line, ANY) for mutant in found}
    return sorted(accepted().keys() - existing)


def copied(folder: Path) -> Path:
    """Copy the repository, without ignored files."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True
    )
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def run_tests(root: Path, calls: Sequence[str], limit: float, is_mutant: bool = True) -> tuple[str, str]:
    """Run pytest of a copy in a fork; return ``passed``, ``failed`` or ``timeout``, and the test that failed."""
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for descriptor, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(output.fileno(), descriptor)
                setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))  # a test may have replaced it
            resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))  # a busy machine does not count
            _in_child(root, calls, is_mutant)
        deadline, status = time.monotonic() + 5 * limit, None
        while status is None and time.monotonic() < deadline:
            done, code = os.waitpid(pid, os.WNOHANG)
            status = code if done else None
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # it, and processes that its tests left
        if status is None:
            os.waitpid(pid, 0)
        if status is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
            return "timeout", ""
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    if status == 0:
        return "passed", ""
    failed = [line.split(" ", 1)[1].split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return "failed", failed[0] if failed else "\n".join(lines)[-2000:]


def _in_child(root: Path, calls: Sequence[str], is_mutant: bool) -> None:
    """Run pytest in a copy until a test fails, and exit."""
    import pytest

    code = 1
    try:
        for name in [name for name in sys.modules if name.split(".")[0] in ("tests", "lgrpo")]:
            del sys.modules[name]
        os.chdir(root)
        sys.path[:] = [str(root), *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ["PYTHONPATH"] = str(root)
        if is_mutant:  # its file may have the size and time of the mutant before
            sys.dont_write_bytecode = True
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
        for call in calls:
            code = int(pytest.main([*options, *shlex.split(call)]))
            if code:
                break
    except BaseException as error:
        print(f"ERROR {error!r}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def digest(root: Path, paths: Sequence[str]) -> str:
    """Return a checksum of files and of all files in folders."""
    found = hashlib.sha256()
    for path in sorted(root / path for path in paths):
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()[:16]


def paths_of(calls: Sequence[str]) -> list[str]:
    """Return the files and folders that arguments of pytest name."""
    words = {word.split("::")[0] for call in calls for word in shlex.split(call)}
    return sorted(word for word in words if word.startswith(("tests/", "lgrpo/")))


def is_known(row: dict[str, str], source: str, tests: str) -> bool:
    """Return whether a result still holds for a file and its tests."""
    return row["source"] == source and (row["result"] == "killed" or row["tests"] == tests)


class Checker:
    """Tests mutants in a copy of the repository."""

    def __init__(self, root: Path, limit: float) -> None:
        self.root = root
        self.limit = limit
        self._passing: set[tuple[str, ...]] = set()
        tests = paths_of([call for calls in GUARDS.values() for call in calls])
        compileall.compile_dir(root / "lgrpo", quiet=2)
        run_tests(root, [f"--collect-only {' '.join(tests)}"], 600, is_mutant=False)  # compiles the tests

    def result(self, mutant: Mutant) -> tuple[str, str]:
        """Return ``killed`` or ``survived``, and the test that failed."""
        path, calls = self.root / mutant.file, guards(mutant.file)
        source = path.read_bytes()
        path.write_bytes(mutant.applied(source))
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        try:
            result, test = run_tests(self.root, calls, self.limit)
        finally:
            path.write_bytes(source)
        if result == "failed" and test.startswith(("tests/", "lgrpo/")):
            self._check_passes((shlex.quote(test),))
        elif result != "passed":
            self._check_passes(calls)
        return "survived" if result == "passed" else "killed", test or result

    def _check_passes(self, calls: tuple[str, ...]) -> None:
        """Check that tests pass without a change."""
        if calls not in self._passing:
            result, test = run_tests(self.root, calls, self.limit)
            if result != "passed":
                raise SystemExit(f"{' '.join(calls)} fails without a change ({result}; see --limit): {test}")
            self._passing.add(calls)


def test_all(chosen: Sequence[Mutant], root: Path, out: Path, limit: float, until: float) -> Counter[str]:
    """Test the mutants that have no result yet, until a time; return the number of each result."""
    known: dict[tuple[str, ...], dict[str, str]] = {}
    if out.exists():
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        known = {(row["file"], row["line"], row["change"]): row for row in rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    reasons, counts, checker = accepted(), Counter[str](), Checker(root, limit)
    for index, mutant in enumerate(chosen, 1):
        source, tests = digest(root, [mutant.file]), digest(root, paths_of(guards(mutant.file)))
        row = known.get(mutant.key)
        if row is None or not is_known(row, source, tests):
            if time.monotonic() > until:
                counts["not tested"] += 1
                continue
            started = time.monotonic()
            result, test = checker.result(mutant)
            row = {"file": mutant.file, "line": mutant.line, "change": mutant.change, "result": result, "test": test}
            row |= {"seconds": f"{time.monotonic() - started:.1f}", "source": source, "tests": tests}
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        is_accepted = mutant.key in reasons or (mutant.file, mutant.line, ANY) in reasons
        result = "accepted" if row["result"] == "survived" and is_accepted else row["result"]
        counts[result] += 1
        if result == "survived":
            print(f"[{index}/{len(chosen)}] survived: {mutant}", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modules", nargs="*", help="beginning of the files' paths, such as lgrpo/losses (default: all)")
    parser.add_argument("--max", type=int, help="number of mutants, drawn at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument(
        "--limit",
        type=float,
        default=120,
        help="CPU seconds of a mutant, or a fifth of its seconds, after which it counts as killed",
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="minutes after which to stop")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants.jsonl", help="file of the results")
    parser.add_argument("--list", action="store_true", help="print the mutants only")
    arguments = parser.parse_args()
    found = all_mutants(ROOT)
    if missing := gone(found):
        raise SystemExit(f"{ACCEPTED.name} lists mutants that no longer exist: {missing}")
    chosen = [m for m in found if not arguments.modules or m.file.startswith(tuple(arguments.modules))]
    random.Random(arguments.seed).shuffle(chosen)
    chosen = chosen[: arguments.max]
    if arguments.list:
        print("\n".join(str(mutant) for mutant in chosen))
        print(f"{len(chosen)} mutants")
        return
    for name in PRELOADED:
        importlib.import_module(name)
    until = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory(prefix="lgrpo-mutants-") as folder:
        counts = test_all(chosen, copied(Path(folder)), arguments.out, arguments.limit, until)
    print(", ".join(f"{number} {result}" for result, number in sorted(counts.items())))
    if counts["survived"]:
        raise SystemExit(f"add a test for each survivor, or accept it in {ACCEPTED.relative_to(ROOT)} with a reason")


if __name__ == "__main__":
    main()
