"""What a launcher, or a plugin that starts processes for a stage, uses besides `ptpipe`.

A launcher answers the hook `ptpipe_launch(call, tell)`. It may send `call.to_json()` to another process, which runs it:

    call = Call.from_json(text)
    vocabulary = load_vocabulary(call.plugins, Path(call.folder))
    outputs = execute(call, vocabulary, Store(Path(call.artifacts)), tell, rank)

Save each output to an empty folder (`artifact.save(folder)`) and return the folders by output name.
"""

from ptpipe.execution.call import Call, Nodes, StoredInput, execute
from ptpipe.execution.local_launcher import LocalLauncher
from ptpipe.plan.vocabulary import Plugin, Vocabulary, load_vocabulary
from ptpipe.store.store import Store

__all__ = [
    "Call",
    "LocalLauncher",
    "Nodes",
    "Plugin",
    "Store",
    "StoredInput",
    "Vocabulary",
    "execute",
    "load_vocabulary",
]
