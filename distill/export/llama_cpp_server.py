"""llama.cpp's server out of the Python wheel xllamacpp, where no llama-server is installed.

Takes the options of llama-server that the export's scripts use, under the same names, and serves the same
HTTP interface: python llama_cpp_server.py -m TARGET.gguf -md DRAFT.gguf --spec-type draft-simple. A copy
stands in the `serve` folder of an export, so it needs nothing but the wheel.
"""

import argparse
import os
import signal
import sys


def parse(words: list[str]) -> argparse.Namespace:
    """The options; those of llama-server that are not here are refused, not ignored."""
    parser = argparse.ArgumentParser(allow_abbrev=False, description="llama.cpp's server from xllamacpp")
    parser.add_argument("-m", "--model", required=True, help="GGUF file of the target")
    parser.add_argument("-md", "--model-draft", help="GGUF file of the drafter")
    parser.add_argument("--spec-type", choices=["none", "draft-simple"], default="none")
    parser.add_argument("--spec-draft-n-max", type=int, default=3, help="drafted tokens a round")
    parser.add_argument(
        "--spec-draft-p-min", type=float, default=0.0, help="stop drafting below this probability"
    )
    parser.add_argument("--spec-draft-sampling", choices=["greedy", "probabilistic"], default="greedy")
    parser.add_argument(
        "-c", "--ctx-size", type=int, default=0, help="positions; 0: as many as the model has"
    )
    parser.add_argument("-t", "--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-np", "--parallel", type=int, default=1, help="requests at the same time")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080, help="0: any free one")
    return parser.parse_args(words)


def main() -> None:
    """Start the server, say where it listens, and serve until SIGINT or SIGTERM."""
    options = parse(sys.argv[1:])
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.n_ctx = options.ctx_size
    params.n_parallel = options.parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.hostnames = [options.host]
    params.port = options.port
    if options.spec_type == "draft-simple":
        if not options.model_draft:
            sys.exit("--spec-type draft-simple needs the drafter: -md DRAFT.gguf")
        speculative = params.speculative
        speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
        draft = speculative.draft
        draft.mparams.path = options.model_draft
        draft.n_max, draft.p_min = options.spec_draft_n_max, options.spec_draft_p_min
        draft.probabilistic = options.spec_draft_sampling == "probabilistic"
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = options.threads
    waited = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)  # before the server's threads are made, which inherit it
    server = xllamacpp.Server(params)
    sys.stdout.write(f"listening on {server.listening_address}\n")
    sys.stdout.flush()
    signal.sigwait(waited)
    del server


if __name__ == "__main__":
    main()
