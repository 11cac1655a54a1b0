"""Stream a completion and a chat from a running server with the OpenAI client.

make serve                                     # in one terminal
.venv/bin/python examples/openai_client.py     # in another
"""

from __future__ import annotations

import argparse
import sys

from openai import OpenAI


def main() -> None:
    """One streamed completion, then one chat turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--prompt", default="Emma could not")
    parser.add_argument("--max-tokens", type=int, default=80)
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.url, api_key="unused", timeout=60)
    model = client.models.list().data[0].id

    sys.stdout.write(arguments.prompt)
    stream = client.completions.create(
        model=model,
        prompt=arguments.prompt,
        max_tokens=arguments.max_tokens,
        temperature=0.7,
        seed=1,
        stream=True,
    )
    for chunk in stream:
        sys.stdout.write(chunk.choices[0].text)
        sys.stdout.flush()

    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Do you like Mr. Darcy?"}],
        max_tokens=arguments.max_tokens,
        temperature=0.7,
        seed=1,
    )
    sys.stdout.write(f"\n\n-- chat\n{answer.choices[0].message.content}\n")


if __name__ == "__main__":
    main()
