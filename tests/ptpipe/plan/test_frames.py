"""The lines of plugins' code that an error came through."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from ptpipe.plan.frames import describe_error, own_frames
from ptpipe.plan.vocabulary import load_vocabulary

from .test_vocabulary import GOOD, _alone, write

__all__ = ["_alone"]


def test_frames_of_a_plugins_own_code(tmp_path):
    write(
        tmp_path, "acme_frames/__init__.py", "from ptpipe import hookimpl\n@hookimpl\ndef ptpipe_stages(): return []\n"
    )
    write(tmp_path, "acme_frames/rooms/inner.py", "import json\ndef work():\n    return json.loads('{')\n")
    write(tmp_path, "one_file.py", "import beside_it\n" + GOOD, kind="a.b")
    write(tmp_path, "beside_it.py", "def work():\n    from acme_frames.rooms import inner\n    return inner.work()\n")
    sys.path.append(str(tmp_path))
    vocabulary = load_vocabulary(["acme_frames", "./one_file.py"], tmp_path)
    assert not vocabulary.problems
    with pytest.raises(ValueError, match="Expecting") as raised:
        sys.modules["beside_it"].work()
    assert own_frames(vocabulary.plugins, raised.value) == (
        "beside_it.py:3 in work: return inner.work()",
        "inner.py:3 in work: return json.loads('{')",
    )
    built_in = [replace(plugin, source="built in") for plugin in vocabulary.plugins[:1]]
    assert own_frames([*built_in, *vocabulary.plugins[1:]], raised.value) == (
        "beside_it.py:3 in work: return inner.work()",
        "inner.py:3 in work: return json.loads('{')",
    )
    assert own_frames(vocabulary.plugins[:1], raised.value) == ("inner.py:3 in work: return json.loads('{')",)
    assert own_frames((), raised.value) == ()
    message = "it raised JSONDecodeError (inner.py:3: return json.loads('{'))"
    assert own_frames(vocabulary.plugins, raised.value, (), message) == ("beside_it.py:3 in work: return inner.work()",)


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_the_place_of_an_error_is_not_in_pluggy_or_pydantic(tmp_path, folder):
    library = tmp_path / folder / "pluggy" / "callers.py"
    with pytest.raises(ZeroDivisionError) as raised:
        exec(compile("def call():\n    1 / 0\ncall()", str(library), "exec"))
    assert describe_error(raised.value) == f"ZeroDivisionError: division by zero (test_frames.py:{raised.tb.tb_lineno})"


def test_hooks_that_wrap_what_failed_are_left_out(tmp_path):
    body = "    if DIVISOR:\n        return (yield)\n    return 1 / (yield)\n"
    wrapper = "@hookimpl(wrapper=True)\ndef ptpipe_launch():\n" + body
    head = "from ptpipe import hookimpl\nDIVISOR = 1\n"
    write(tmp_path, "wrapping.py", head + wrapper)
    write(tmp_path, "launching.py", head + "@hookimpl\ndef ptpipe_launch(call):\n    return 0 if call else 1 / 0\n")
    vocabulary = load_vocabulary(["./wrapping.py", "./launching.py"], tmp_path)
    launch = vocabulary.manager.hook.ptpipe_launch
    with pytest.raises(ZeroDivisionError) as raised:
        launch(call=0, tell=print)
    own = "launching.py:5 in ptpipe_launch: return 0 if call else 1 / 0"
    assert own_frames(vocabulary.plugins, raised.value) == (own,)
    vocabulary.plugins[-2].module.DIVISOR = 0
    with pytest.raises(ZeroDivisionError) as raised:
        launch(call=1, tell=print)
    assert own_frames(vocabulary.plugins, raised.value) == ("wrapping.py:7 in ptpipe_launch: return 1 / (yield)",)
    assert own_frames(vocabulary.plugins, ValueError("never raised")) == ()


def test_frames_of_built_in_plugins_are_left_out_where_those_of_others_follow(tmp_path):
    write(tmp_path, "acme_launch/__init__.py", "def ptpipe_stages(): return []\n")
    write(tmp_path, "acme_launch/inner.py", "def launch(call):\n    return call()\n")
    write(tmp_path, "plain.py", "from acme_launch import inner\ndef work():\n    return 1 / 0\n" + GOOD, kind="a.b")
    sys.path.append(str(tmp_path))
    package, plain = load_vocabulary(["acme_launch", "./plain.py"], tmp_path).plugins
    with pytest.raises(ZeroDivisionError) as raised:
        plain.module.inner.launch(plain.module.work)
    outer, own = "inner.py:2 in launch: return call()", "plain.py:3 in work: return 1 / 0"
    assert own_frames([package, plain], raised.value) == (outer, own)
    built_in = replace(package, source="built in")
    assert own_frames([built_in, plain], raised.value) == (own,)
    assert own_frames([built_in], raised.value) == (outer,), "a fault of its own"
