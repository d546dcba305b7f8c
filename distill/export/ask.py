"""Ask llama.cpp's server over HTTP and read the acceptance back: python ask.py [--url URL] [PROMPT].

A copy stands in the `serve` folder of an export; it needs nothing but Python. Exits 1 where the server did
not speculate.
"""

import argparse
import json
import sys
import time
import urllib.error
import urllib.request

WAIT_SECONDS = 120


def main() -> None:
    """Print the answer, the accepted and drafted tokens, and the tokens per second."""
    parser = argparse.ArgumentParser(description="ask llama.cpp's server; was speculation on?")
    parser.add_argument("prompt", nargs="*", default=["Write a JSON object that describes a book."])
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    question = {
        "messages": [{"role": "user", "content": " ".join(options.prompt)}],
        "max_tokens": options.max_tokens,
        "temperature": 0,
    }
    request = urllib.request.Request(
        f"{options.url}/v1/chat/completions",
        json.dumps(question).encode(),
        {"Content-Type": "application/json"},
    )
    answer = json.loads(_patiently(request))
    timings = answer["timings"]
    drafted, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    sys.stdout.write(answer["choices"][0]["message"]["content"] + "\n\n")
    if not drafted:
        sys.exit("the server did not speculate: its log says why")
    sys.stdout.write(
        f"accepted {accepted} of {drafted} drafted tokens ({accepted / drafted:.0%}), "
        f"{timings['predicted_per_second']:.1f} tokens/s\n"
    )


def _patiently(request: urllib.request.Request) -> bytes:
    """The reply; a server that was started a moment ago may still be loading."""
    for left in reversed(range(WAIT_SECONDS)):
        try:
            with urllib.request.urlopen(request) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as error:
            if error.code != 503 or not left:  # 503: loading the model
                raise
        except urllib.error.URLError as error:
            if not left:
                sys.exit(f"no server at {request.full_url}: {error.reason}")
        time.sleep(1)
    raise AssertionError("the last attempt returns or raises")


if __name__ == "__main__":
    main()
