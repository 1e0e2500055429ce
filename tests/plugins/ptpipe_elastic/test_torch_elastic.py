from __future__ import annotations

import threading
from pathlib import Path

from ptpipe_elastic.bootstrap import log_file
from ptpipe_elastic.torch_elastic import run_workers


def test_workers_of_a_thread_that_can_set_no_signal_handlers(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            run_workers("platform", [], 1, tmp_path)
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert raised == []
    assert log_file(tmp_path, 0).read_text(encoding="utf-8")
