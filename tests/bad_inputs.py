"""What people get wrong, and what they are told: python -m tests.bad_inputs [PART OF A NAME].

Every case is a command of a user, run in a process of its own (forked, so that the libraries are loaded once) with a fresh
folder: exit code 2, one message that matches, no traceback.
"""

from __future__ import annotations

import gzip
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from .forked import finish, start

ROWS = [{"instruction": f"Count to {i}.", "input": "", "output": " ".join(map(str, range(1, i + 1)))} for i in range(1, 25)]
RECIPE = """\
model: {name_or_path: embedded:tiny}
data: {path: rows.jsonl, template: plain, max_length: 320}
selection: {num_clusters: 2, min_fraction: 0.5, tokens_per_batch: 1024}
train: {epochs: 1, global_batch_size: 8, micro_batch_size: 4, lr: 1e-3, num_workers: 0}
deepspeed: {config: cpu}
"""


@dataclass(frozen=True)
class Case:
    """`make(folder)` writes what is wrong and returns the arguments; `message` is a pattern of what must be said."""

    name: str
    make: Callable[[Path], list[str]]
    message: str
    script: str = "preprocess.py"


def lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def rows_are(data: bytes | list, *arguments: str, name: str = "rows.jsonl") -> Callable[[Path], list[str]]:
    """The recipe, with these rows."""

    def make(folder: Path) -> list[str]:
        (folder / name).write_bytes(data if isinstance(data, bytes) else lines(data))
        path = [] if name == "rows.jsonl" else ["--set", f"data.path={name}"]
        return ["--recipe", "recipe.yaml", *path, *arguments]

    return make


def settings(*pairs: str) -> Callable[[Path], list[str]]:
    """The recipe on good rows, with these settings."""
    return rows_are(ROWS, *(word for pair in pairs for word in ("--set", pair)))


def recipe_is(change: Callable[[str], str]) -> Callable[[Path], list[str]]:
    """The recipe's text, changed."""

    def make(folder: Path) -> list[str]:
        (folder / "recipe.yaml").write_text(change(RECIPE))
        return rows_are(ROWS)(folder)

    return make


def arguments(*words: str) -> Callable[[Path], list[str]]:
    return lambda folder: list(words)


def ds_config(config: dict | str, *pairs: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / "cpu.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return settings("deepspeed.config=cpu.json", *pairs)(folder)

    return make


def model_is(change: Callable[[Path], None], *pairs: str) -> Callable[[Path], list[str]]:
    """A copy of the tiny model, changed."""

    def make(folder: Path) -> list[str]:
        from cluster_ds.embedded import resolve_model

        shutil.copytree(resolve_model("embedded:tiny"), folder / "model")
        change(folder / "model")
        return settings("model.name_or_path=./model", *pairs)(folder)

    return make


def after_a_plan(change: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    """A finished plan first, then what is wrong."""

    def make(folder: Path) -> list[str]:
        from cluster_ds.distributed import Ranks
        from cluster_ds.prepare import prepare
        from cluster_ds.recipe_file import load_recipe

        rows_are(ROWS)(folder)
        prepare(load_recipe("recipe.yaml"), (folder / "runs" / "recipe").resolve(), Ranks(0, 1, 0))
        return change(folder)

    return make


def weights_are(function) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        function(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return change


def spoil_embedding(tensors) -> None:
    tensors["model.embed_tokens.weight"][50:] = float("nan")


def config_without(key: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config.pop(key)
        (folder / "config.json").write_text(json.dumps(config))

    return change


def scaled(folder: Path) -> None:
    """A Granite model divides its logits."""
    from transformers import GraniteConfig, GraniteForCausalLM

    from cluster_ds.embedded import byte_tokenizer

    shutil.rmtree(folder)
    GraniteForCausalLM(GraniteConfig(
        vocab_size=259, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, logits_scaling=4.0,
    )).save_pretrained(folder)  # fmt: skip
    byte_tokenizer().save_pretrained(folder)


def small_vocabulary(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    for path in folder.glob("*.safetensors"):
        path.unlink()
    LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
    )).save_pretrained(folder)  # fmt: skip


def no_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def cut_weights(folder: Path) -> None:
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])


def remove(pattern: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return change


def files_are(files: dict[str, bytes], path: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        return ["--recipe", "recipe.yaml", "--set", f"data.path={path}"]

    return make


def file_instead_of_folder(folder: Path) -> list[str]:
    (folder / "occupied").write_text("a file")
    return [*rows_are(ROWS)(folder), "--output_dir", "occupied"]


def foreign_plan(folder: Path) -> list[str]:
    (folder / "runs" / "recipe" / "plan").mkdir(parents=True)
    return rows_are(ROWS)(folder)


def foreign_model(folder: Path) -> list[str]:
    (folder / "runs" / "recipe" / "model").mkdir(parents=True)
    return rows_are(ROWS)(folder)


def lost(pattern: str) -> Callable[[Path], list[str]]:
    def change(folder: Path) -> list[str]:
        max(folder.glob(pattern)).unlink()
        shutil.rmtree(folder / "runs" / "recipe" / "plan")
        return rows_are(ROWS)(folder)

    return change


def damaged(pattern: str) -> Callable[[Path], list[str]]:
    def change(folder: Path) -> list[str]:
        path = max(folder.glob(pattern))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 255
        path.write_bytes(data)
        if "plan" not in pattern:
            shutil.rmtree(folder / "runs" / "recipe" / "plan")
        return rows_are(ROWS)(folder)

    return change


def many(row: dict) -> list[dict]:
    return [row] * 5


CHAT = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
TWO_TURNS = {"messages": CHAT["messages"] * 2}
UNKNOWN_ROLE = {"messages": [{"role": "bot", "content": "a"}]}
TABLE = pa.Table.from_pylist(ROWS)


def parquet_bytes() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(TABLE, sink)
    return sink.getvalue().to_pybytes()


CASES = [
    # recipes and arguments
    Case("recipe misspelt", arguments("--recipe", "quickstar"), "no recipe named 'quickstar': did you mean quickstart"),
    Case("recipe file missing", arguments("--recipe", "nowhere.yaml"), "recipe file nowhere.yaml does not exist"),
    Case("recipe is no YAML", recipe_is(lambda t: t + "\n: ["), "recipe.yaml is not valid YAML"),
    Case("recipe is a list", recipe_is(lambda t: "- 1\n"), "recipe.yaml holds no sections"),
    Case("unknown key", recipe_is(lambda t: t.replace("template:", "templat:")), r"recipe.yaml:2: unknown key data.templat; did you mean data.template\?"),
    Case("wrong type", settings("train.lr=fast"), r"--set train.lr=fast: train.lr: .*got 'fast'"),
    Case("a key twice", recipe_is(lambda t: t + "deepspeed: {config: zero2}\n"), "recipe.yaml:6: deepspeed is given twice"),
    Case("section missing", recipe_is(lambda t: t.replace("train:", "#")), "recipe.yaml: train is missing"),
    Case("--set without =", rows_are(ROWS, "--set", "selection.ratio"), "expected section.key=value"),
    Case("ratio above 1", settings("selection.ratio=1.5"), "selection.ratio: .*less than or equal to 1"),
    Case("two budgets", recipe_is(lambda t: t.replace("num_clusters: 2", "num_clusters: 2, ratio: 0.5, keep: 0.5")), r"ratio \(0.5\) and keep \(0.5\) both set the budget"),
    Case("redraw of a periphery", settings("selection.redraw=epoch"), "redraw epoch draws at random, but choice is peripheral"),
    Case("more than trimming leaves", recipe_is(lambda t: t.replace("num_clusters: 2", "num_clusters: 2, keep: 0.9, trim: 0.2")), "keep 0.9 is more than trim 0.2 leaves of the samples"),
    Case("unequal quotas of cut clusters", recipe_is(lambda t: t.replace("num_clusters: 2", "num_clusters: 2, quota: neyman, balance: random_first")), "balance random_first cuts clusters to equal sizes, quota neyman to others"),
    Case("path and sources", settings("data.sources={a: {path: rows.jsonl}}"), "give either path, or sources"),
    Case("misspelt key in a source", recipe_is(lambda t: t.replace("path: rows.jsonl", "sources: {a: {pth: x}}")), r"unknown key data.sources.a.pth; did you mean data.sources.a.path\?"),
    Case("no such ZeRO config", settings("deepspeed.config=zero9"), "no DeepSpeed config 'zero9': .*zero2", script="train.py"),
    Case("ZeRO config is no JSON", ds_config("{"), "cpu.json is not", script="train.py"),
    Case("unknown DeepSpeed key", ds_config({"zero_optimisation": {}}), r"unknown key zero_optimisation; did you mean zero_optimization\?", script="train.py"),
    Case("a key in both places", ds_config({"gradient_clipping": 0.5}), "gradient_clipping is 0.5, but the recipe makes it 1.0: remove it here", script="train.py"),
    Case("Adafactor with shards", ds_config({"zero_optimization": {"stage": 2}}, "train.optimizer=adafactor"), "Adafactor at ZeRO stage 2 is not Adafactor", script="train.py"),
    Case("batch sizes that do not divide", settings("train.micro_batch_size=3"), r"global_batch_size 8 is not a multiple of micro_batch_size 3 x 1 ranks = 3; these would fit: .*micro_batch_size 1, 2, 4, 8", script="train.py"),
    Case("packs shorter than samples", settings("train.packing=true", "train.max_tokens=100"), "packs of train.max_tokens 100 are shorter than samples of data.max_length 320 may be", script="train.py"),
    Case("a pack that fits no micro-batch", settings("train.packing=true", "train.tokens_per_micro_batch=200"), "packs of 320 tokens do not fit into tokens_per_micro_batch 200: lower train.max_tokens or raise", script="train.py"),
    Case("packs without packing", settings("train.max_tokens=400"), "max_tokens given without packing: true", script="train.py"),
    Case("a GPU recipe without a GPU", settings("deepspeed.config=zero2"), "is for GPUs, and this machine shows none.*--recipe quickstart.*--dry_run", script="train.py"),
    Case("resume from nowhere", rows_are(ROWS, "--resume", "step-00000007"), "--resume step-00000007: no such checkpoint in .*checkpoints, which has none", script="train.py"),
    # too few
    Case("fewer samples than clusters", rows_are(ROWS[:3], "--set", "selection.num_clusters=4"), "3 samples cannot fill 4 clusters: lower selection.num_clusters"),
    Case("fewer samples than a batch", rows_are(ROWS[:6]), "at most 6 of 6 samples can be kept, fewer than global_batch_size 8"),
    Case("fewer kept than a batch", settings("selection.ratio=0.3"), r"kept \d samples, fewer than global_batch_size 8: lower train.global_batch_size or raise selection.ratio", script="train.py"),
    Case("a batch smaller than the clusters", settings("selection.num_clusters=12"), "global_batch_size 8 is smaller than the 12 clusters"),
    Case("more than equal parts can give", settings("selection.keep=1.0", "selection.num_clusters=3"), r"selection.keep 1 needs 8 samples of every cluster, but cluster \d has \d: at most"),
    # data
    Case("data file missing", settings("data.path=nowhere.jsonl"), "data file nowhere.jsonl does not exist"),
    Case("data file empty", rows_are(b""), "rows.jsonl holds no rows"),
    Case("data set not to be had", settings("data.path=owner/name"), "data set 'owner/name' is neither a path nor in .*launch/recipe.py fetch"),
    Case("embedded data misspelt", settings("data.path=embedded:python"), "no embedded data set 'embedded:python'"),
    Case("strange columns", rows_are(many({"question": "q", "answer": "a"})), "has the columns answer, question, which fit no format"),
    Case("mapped column missing", settings("data.columns={response: answer}"), r"has the columns input, instruction, output, which with response <- answer fit no format"),
    Case("instructions all null", rows_are(many({"instruction": None, "output": "a"})), "instruction is empty in 5 of 5 rows.*data.columns"),
    Case("answers all empty", rows_are(many({"instruction": "q", "output": ""})), "none of 5 rows is usable\n.*\n.*5 rows excluded: empty response"),
    Case("answers are objects", rows_are(many({"instruction": "q", "output": {"a": 1}})), r"5 of 5 rows are bad.*\n.*\n  5 bad rows: output is a JSON object where text is expected \(lines 1, 2, 3, 4, 5\)"),
    Case("not JSON", rows_are(b"one\ntwo\n"), r"none of 2 rows is an object with columns; the first is not JSON \(line 1\)"),
    Case("some lines are not JSON", rows_are(lines(ROWS) + b'{"instruction": "cut'), r"1 of 25 rows are bad.*\n.*\n.*not JSON \(line 25\)"),
    Case("not UTF-8", rows_are(lines(ROWS) + b'{"instruction": "\xff"}'), r"not UTF-8 \(line 25\)"),
    Case("UTF-16", rows_are(lines(ROWS).decode().encode("utf-16")), "rows.jsonl is UTF-16: convert it, e.g. iconv"),
    Case("JSON document is an object", rows_are(b'{\n"data": []}', name="rows.json"), "holds a JSON object with the keys data, not a list of rows"),
    Case("cut gzip", rows_are(gzip.compress(lines(ROWS))[:-20], name="rows.jsonl.gz"), "rows.jsonl.gz is damaged: .*fetch or compress it again"),
    Case("cut Parquet", rows_are(parquet_bytes()[:-20], name="rows.parquet"), "rows.parquet is not a whole Parquet file"),
    Case("no Arrow", rows_are(b"ARROW1", name="rows.arrow"), "rows.arrow is neither an Arrow file nor an Arrow stream"),
    Case("ragged CSV", rows_are(b"instruction,output\nq,a\nq,a,b\nq\n", name="rows.csv"), r"2 of 3 rows are bad.*\n.*\n.*3 fields where the header has 2 \(line 3\)\n.*1 fields where the header has 2 \(line 4\)"),
    Case("CSV by semicolons", rows_are(b"instruction;output\nq;a\n", name="rows.csv"), "the header 'instruction;output' has no ','"),
    Case("unreadable suffix", rows_are(b"x", name="rows.xlsx"), r"expected .json, .jsonl, .csv, .tsv, .parquet, .arrow \(or these with .gz\), not .xlsx"),
    Case("glob without match", files_are({}, "shards/*.jsonl"), r"no file matches shards/\*.jsonl"),
    Case("folder without data", files_are({"d/notes.md": b"x"}, "d"), "d holds no data file .*only notes.md"),
    Case("folder with a test set only", files_are({"d/test.jsonl": lines(ROWS)}, "d"), "d has no files of split 'train', only test.jsonl: set data.split"),
    Case("unknown role", rows_are(many(UNKNOWN_ROLE)), "unknown role 'bot'; known: system, user, human, assistant"),
    Case("a chat in a single-turn template", rows_are(many(TWO_TURNS), "--set", "data.template=alpaca"), r"template 'alpaca' holds one user and one assistant turn, not \(user, assistant, user, assistant\): use chat"),
    Case("prompts fill the window", settings("data.max_length=4"), "no supervised token left in any of 24 rows after truncation to data.max_length 4"),
    Case("most rows are masked", settings("data.max_length=14", "data.max_masked_fraction=0.1"), r"15 of 24 rows have no supervised token within 14 tokens, more than data.max_masked_fraction 0.1 allows: raise data.max_length"),
    Case("no text, only a list", rows_are(b"[1, 2]", name="rows.json"), r"none of 2 rows is an object with columns; the first is a JSON number \(row 1\)"),
    # models
    Case("model not to be had", settings("model.name_or_path=owner/name"), "model 'owner/name' is neither a path nor in .*launch/recipe.py fetch"),
    Case("model folder missing", settings("model.name_or_path=./nowhere"), "model folder ./nowhere does not exist"),
    Case("model without weights", model_is(remove("*.safetensors")), "has no .*safetensors"),
    Case("weights that were cut", model_is(cut_weights), "model.safetensors is damaged .*fetch or copy it again", script="train.py"),
    Case("model without configuration", model_is(remove("config.json")), "has no config.json"),
    Case("tokenizer without chat template", model_is(no_chat_template, "data.template=chat"), "template 'chat' needs a tokenizer with one chat template"),
    Case("model smaller than its tokenizer", model_is(small_vocabulary), r"the tokenizer gives token id \d+, but .*model has embeddings for 100: resize the model"),
    Case("weights that are not finite", model_is(weights_are(spoil_embedding)), "the model gives NaN or infinity on samples [0-9a-f]{16}-0"),
    Case("scaled logits", model_is(scaled), "GraniteForCausalLM: its logits differ by up to .* it scales or caps them"),
    # folders
    Case("output folder is a file", file_instead_of_folder, r"cannot write to .*occupied \(File exists\): choose another --output_dir"),
    Case("somebody else's plan folder", foreign_plan, "plan is there, but was not made by cluster-ds"),
    Case("somebody else's model folder", foreign_model, "model is there, but was not made by cluster-ds", script="train.py"),
    Case("plan of other data", after_a_plan(rows_are(ROWS[:20])), "was made from something else:\n  data: plan"),
    Case("plan of other settings", after_a_plan(settings("selection.seed=7")), "seed: plan 0, now 7"),
    Case("damaged plan", after_a_plan(damaged("runs/recipe/plan/table.parquet")), "plan .* is damaged: table.parquet does not have the hash"),
    Case("damaged token cache", after_a_plan(damaged("runs/cache/tokens/*/input_ids.npy")), "token cache .* is damaged: delete it"),
    Case("damaged proxy shard", after_a_plan(damaged("runs/cache/proxies/*/shard-00000.safetensors")), "shard .* is damaged, it does not have the checksum of shard-00000.json: `rm -f .*shard-00000.safetensors .*shard-00000.json` and the same command"),
    Case("missing proxy shard", after_a_plan(lost("runs/cache/proxies/*/shard-00000.safetensors")), "shard .*shard-00000.safetensors is missing: `rm -f "),
]  # fmt: skip


def make(name: str, folder: Path) -> list[str]:
    """A case's arguments, in the process that runs it."""
    (case,) = [case for case in CASES if case.name == name]
    return case.make(folder)


def run(case: Case) -> tuple[int, str]:
    """The exit code of a case and everything it printed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(RECIPE)
        output = folder / "printed"
        code = finish(start(case.script, partial(make, case.name, folder), folder, output))
        return code, output.read_text().replace(name, "FOLDER")


def verdict(case: Case, code: int, printed: str) -> str | None:
    """What is wrong with how a case was refused; None if nothing is."""
    if "Traceback" in printed:
        return "a traceback"
    if code != 2:
        return f"exit code {code} instead of 2"
    errors = printed[printed.find("error: ") :] if "error: " in printed else ""
    return None if re.search(case.message, errors, re.DOTALL if "\n" not in case.message else 0) else f"no message like {case.message!r}"


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    failed = 0
    chosen = [case for case in CASES if wanted in case.name]
    for case in chosen:
        code, printed = run(case)
        problem = verdict(case, code, printed)
        failed += problem is not None
        message = printed[printed.find("error: ") :].strip() if "error: " in printed else printed.strip()[-2000:]
        print(f"\n[{'ok' if problem is None else 'WRONG: ' + problem}] {case.name}: exit code {code}\n    " + message.replace("\n", "\n    "), flush=True)
    print(f"\n{len(chosen) - failed} of {len(chosen)} cases are refused as they should be")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
