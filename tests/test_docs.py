"""What docs/ tells people to type and to copy exists: commands, options, manifests, files."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path
from typing import Any

import click
import pytest
from ruamel.yaml import YAML

from ptpipe import Context, ManifestError, load_plan
from ptpipe.cli import cli
from ptpipe.plan.vocabulary import load_vocabulary
from ptpipe_data import TextConfig, load_text
from ptpipe_train import TrainConfig
from ptpipe_train.config_parallel import MODES_OF_OPTION

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "parallel.md"
CLUSTERS = ROOT / "docs" / "clusters"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLES = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node-a", "MASTER_PORT": "29400"}
VARIABLES |= {"manifest": "manifests/mnist_ddp.yaml", "artifacts": "artifacts"}


def blocks(language: str) -> list[str]:
    return [match[2] for match in BLOCK.finditer(PAGE.read_text(encoding="utf-8")) if match[1] == language]


def documents(text: str) -> list[Any]:
    return list(YAML(typ="safe", pure=True).load_all(text))


def job() -> dict[str, Any]:
    return next(d for d in documents((CLUSTERS / "pytorchjob.yaml").read_text()) if d["kind"] == "PyTorchJob")


def containers() -> list[dict[str, Any]]:
    replicas = job()["spec"]["pytorchReplicaSpecs"].values()
    return [container for replica in replicas for container in replica["template"]["spec"]["containers"]]


def commands() -> list[str]:
    """All command lines that call ptpipe, in the page's blocks and in the files to copy."""
    shell = [*blocks("sh"), (CLUSTERS / "train.sbatch").read_text(), *(each["args"][0] for each in containers())]
    lines = "\n".join(shell).replace("\\\n", " ").splitlines()
    found = [re.search(r"(?:^|-m |exec |\s{2,})ptpipe (.*)", line) for line in lines if not line.startswith("#")]
    return [match[1].partition("  #")[0] for match in found if match]


def parsed(line: str) -> click.Context:
    """Parse the arguments as the command line would, without doing anything."""
    name, *arguments = shlex.split(os.path.expandvars(line))
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, f"there is no command {name}"
    return command.make_context(name, arguments)


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)


def test_every_command_line_can_be_parsed():
    names = [parsed(line).info_name for line in commands()]
    assert names.count("run") == 7  # four of the page, one of the script, one of each kind of pod
    assert {"doctor", "run"} <= set(names)


def test_a_command_line_with_a_wrong_option_is_found():
    with pytest.raises(click.UsageError):
        parsed("run manifests/mnist_ddp.yaml --num-nodes 2")


def test_commands_and_manifests_in_the_text_exist():
    text = PAGE.read_text(encoding="utf-8")
    inline = re.findall(r"`ptpipe ([^`]+)`", text)
    assert len(inline) >= 3
    for line in inline:
        if " " in line:
            parsed(line)
        else:
            assert cli.get_command(click.Context(cli), line)
    named = set(re.findall(r"\b(?:manifests|docs|tests)/[\w/]+\.\w+", text))
    assert {f"manifests/mnist_{name}.yaml" for name in ("ddp", "fsdp", "pp", "ddp_pp")} <= named
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert [path for path in [*named, *(f"docs/{link}" for link in links)] if not (ROOT / path).is_file()] == []


def test_stages_in_the_text_are_valid():
    (stage,) = (stage for block in blocks("yaml") for document in documents(block) for stage in document.values())
    assert stage["uses"] == "train.supervised"
    TrainConfig.model_validate_json(json.dumps(stage["with"]), strict=True)


def test_the_table_names_the_options_of_each_mode():
    rows = re.findall(r"^\| `([^`]+)` \|[^|]*\|[^|]*\|([^|]*)\|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {mode: set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", text))) for mode, text in rows}
    known = {mode: {option for option, modes in MODES_OF_OPTION.items() if mode in modes} for mode in named}
    assert named.pop("ddp+pp") == {"pp", "compress"}  # "those of pp, and compress"
    assert known.pop("ddp+pp") == known["pp"] | {"compress"}
    assert named == known
    assert set(named) == {"single", "dp", "ddp", "fsdp", "pp"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_batch_script_is_a_script():
    checked = subprocess.run(["bash", "-n", CLUSTERS / "train.sbatch"], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_files_to_copy_start_as_many_workers_as_their_manifest_wants():
    stages = documents((ROOT / VARIABLES["manifest"]).read_text())[0]["stages"]
    workers = {stage["with"]["parallel"]["workers"] for stage in stages.values() if stage["uses"] == "train.supervised"}
    script = (CLUSTERS / "train.sbatch").read_text()
    nodes, tasks = (
        int(re.search(rf"^#SBATCH --{name}=(\d+)$", script, re.MULTILINE)[1]) for name in ("nodes", "ntasks-per-node")
    )
    assert workers == {nodes * tasks}
    assert "nprocPerNode" not in job()["spec"]  # it would multiply WORLD_SIZE, which is to be the number of pods
    num_pods = sum(replica["replicas"] for replica in job()["spec"]["pytorchReplicaSpecs"].values())
    assert {num % num_pods for num in workers} == {0}


def test_the_job_is_what_the_operator_expects():
    """Kubeflow's Training Operator, version 1: a Master and Workers, each with a container named pytorch."""
    assert (job()["apiVersion"], set(job()["spec"]["pytorchReplicaSpecs"])) == ("kubeflow.org/v1", {"Master", "Worker"})
    assert job()["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"] == 1
    assert [container["name"] for container in containers()] == ["pytorch", "pytorch"]
    claims = {d["metadata"]["name"] for d in documents((CLUSTERS / "pytorchjob.yaml").read_text()) if d != job()}
    for replica in job()["spec"]["pytorchReplicaSpecs"].values():
        pod = replica["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]} == volumes
        named = {v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
        assert named == claims


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_every_stage_of_the_guides_is_valid(page):
    found = [match[2] for match in BLOCK.finditer(page.read_text(encoding="utf-8")) if match[1] == "yaml"]
    pieces = [document for text in found for document in documents(text)]
    named = [stage for piece in pieces for stage in piece.get("stages", piece).values()]
    kinds = load_vocabulary().stages
    for stage in named:
        kinds[stage["uses"]].config_type.model_validate_json(json.dumps(stage.get("with", {})), strict=True)


def test_the_files_of_the_guide_to_scripts_fit_each_other(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "own_script.md").read_text(encoding="utf-8")
    code, stages = re.search(r"```python\n(.*?)```\n```yaml\n(.*?)```", text, re.DOTALL).groups()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "for_ptpipe.py").write_text(code)
    (tmp_path / "main.py").write_text("class Net: ...\n")
    (tmp_path / "m.yaml").write_text("version: 1\nname: m\nstages:\n" + textwrap.indent(stages, "  "))
    assert [stage.kind for stage in load_plan(tmp_path / "m.yaml").stages] == ["data.python", "model.python"]
    (tmp_path / "main.py").write_text("")
    with pytest.raises(ManifestError, match="has no function or class 'Net'"):
        load_plan(tmp_path / "m.yaml")


def test_the_tokenizer_of_characters_in_the_guide_to_data(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (code,) = [match[2] for match in BLOCK.finditer(text) if match[1] == "python" and "tokenizers" in match[2]]
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("grüne Bäume\n" * 40, encoding="utf-8")
    exec(compile(code, "data.md", "exec"), {})
    config = TextConfig(path="book.txt", task="language_modeling", tokenizer="characters.json", max_length=8)
    data = load_text(config, Context("d", "data.text", 0, tmp_path))
    (tokens,) = data.info.inputs.values()
    assert tokens.vocabulary_sizes == (2 + len(set("grüne Bäume\n")),)
