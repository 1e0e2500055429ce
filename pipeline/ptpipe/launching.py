"""What a launcher, or a plugin that starts processes for a stage, uses besides `ptpipe`.

A launcher implements the hook `ptpipe_launch(call, tell)`. It may send `call.to_json()` to another process:

    call = Call.from_json(text)
    vocabulary = load_vocabulary(call.plugins, Path(call.folder))
    outputs = execute(call, vocabulary, Store(Path(call.artifacts)), tell, rank)

That process saves each output of rank 0 to an empty folder (`artifact.save(folder)`), and the launcher returns the
folders by output name. Events travel back as `event_to_json(event)`. What the stage raises travels back as
`error_text(error)` and `error_frames(vocabulary.plugins, call.source_folders, error)`: the `frames` of a StageError are
shown below it.

Start a Python process by `python_command(module)`: it imports what this one does, where `python -m` would import from
the working directory first.

A process of your own that calls `ptpipe.run` begins with `SignalHandlers().install()`: Ctrl-C, SIGTERM and SIGHUP then
end the run as they end `ptpipe run`.
"""

from ptpipe.events import FilesRead, ModulesImported, event_from_json, event_to_json
from ptpipe.execution.call import Call, Nodes, StoredInput, execute, make_call
from ptpipe.execution.causes import error_frames
from ptpipe.execution.local_launcher import LocalLauncher
from ptpipe.execution.python_process import python_command
from ptpipe.execution.signals import SignalHandlers
from ptpipe.plan.vocabulary import Plugin, Vocabulary, load_vocabulary
from ptpipe.printable import error_text
from ptpipe.store.locks import LockedError, exclusive_lock, shared_lock
from ptpipe.store.store import Store

__all__ = [
    "Call",
    "FilesRead",
    "LocalLauncher",
    "LockedError",
    "ModulesImported",
    "Nodes",
    "Plugin",
    "SignalHandlers",
    "Store",
    "StoredInput",
    "Vocabulary",
    "error_frames",
    "error_text",
    "event_from_json",
    "event_to_json",
    "exclusive_lock",
    "execute",
    "load_vocabulary",
    "make_call",
    "python_command",
    "shared_lock",
]
