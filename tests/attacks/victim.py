"""Read strangers' files: a process that imports the libraries once, and forks for each attack.

It reads lines of JSON, {"name", "folder"}, and answers each with a line: what came of the attack and what it cost. The
fork is limited in time and in memory, and tells of everything that looks like code being run.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from . import loaders
from .corpus import ATTACKS

_AS_BYTES = 6 << 30
"""Beyond what the libraries map: where a bound is missing, the attack must not take the machine down."""
_SUSPICIOUS = {
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen"),
    *("pickle.find_class", "socket.connect", "socket.bind", "os.remove", "os.rename", "os.symlink", "shutil.rmtree"),
}


def main() -> None:
    attacks = {attack.name: attack for attack in ATTACKS}
    answers = os.fdopen(os.dup(1), "w")
    _import_libraries()
    for line in sys.stdin:
        request = json.loads(line)
        attack, folder = attacks[request["name"]], Path(request["folder"])
        attack.make(folder)
        before = _listing(folder)
        load = getattr(loaders, attack.load)
        answer = _forked(lambda load=load, folder=folder: load(folder), folder, attack.limit_s)
        answer["left"] = sorted(_listing(folder) - before)
        print(json.dumps(answer), file=answers, flush=True)


def _import_libraries() -> None:
    """Import what the forks would otherwise import each, and load the plugins, as a run does."""
    import onnx  # noqa: F401
    import onnxruntime  # noqa: F401
    import PIL.Image

    import ptpipe_quant.transforms  # noqa: F401
    import ptpipe_torch.data.dataloader  # noqa: F401
    import ptpipe_zoo.nets  # noqa: F401
    from ptpipe.plan.vocabulary import load_vocabulary

    load_vocabulary((), Path.cwd())
    PIL.Image.init()
    gc.collect()
    gc.freeze()  # a fork's collections then copy none of these objects


def _listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.glob("*")}


def _forked(work, folder: Path, limit_s: int) -> dict[str, object]:
    """Do it in a fork; return what it raised and printed, how it ended, and its peak of memory above the start."""
    result, output = folder.with_suffix(".result"), folder.with_suffix(".output")
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            _in_fork(work, folder, result, output, limit_s)
        finally:
            os._exit(0)
    _, status, usage = os.wait4(pid, 0)
    answer = json.loads(result.read_text()) if result.exists() else {"error": "", "text": "", "rss_kb": 0, "ran": []}
    answer["signal"] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    answer["output"] = output.read_text(errors="replace")
    answer["peak_mb"] = (usage.ru_maxrss - answer["rss_kb"]) / 1024
    answer["seconds"] = time.monotonic() - started
    for path in (result, output):
        path.unlink(missing_ok=True)
    return answer


def _in_fork(work, folder: Path, result: Path, output: Path, limit_s: int) -> None:
    target = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(target, 1)
    os.dup2(target, 2)
    signal.setitimer(signal.ITIMER_REAL, limit_s)  # nobody hears SIGALRM: it ends the process wherever it waits
    pages, rss_pages = (int(word) for word in Path("/proc/self/statm").read_text().split()[:2])
    limit = pages * resource.getpagesize() + _AS_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    ran: list[str] = []
    os.chdir(folder)

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if event in _SUSPICIOUS:
            ran.append(f"{event} {str(arguments)[:200]}")

    answer = {"error": "", "text": "", "is_expected_type": True, "rss_kb": rss_pages * resource.getpagesize() // 1024}
    sys.addaudithook(watch)
    try:
        work()
    except BaseException as error:  # noqa: BLE001
        expected = isinstance(error, loaders.ERRORS)
        answer |= {"error": type(error).__name__, "text": str(error)[:2000], "is_expected_type": expected}
    sys.stdout.flush()
    sys.stderr.flush()
    answer["ran"] = list(ran)
    result.write_text(json.dumps(answer))
