"""Asks a running frontend with the `openai` client, and prints who answered and what was cached.

    python examples/chat.py http://127.0.0.1:8000 kvasir-demo
"""

import sys

import openai


def main(url: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    history = [{"role": "system", "content": "You answer questions about parcels, in one sentence."}]
    for question in ("When does my parcel leave?", "And if I bring it at noon?", "Who tells the driver?"):
        history.append({"role": "user", "content": question})
        answer = client.chat.completions.create(
            model=model,
            messages=history,
            max_tokens=16,
            extra_body={"nvext": {"extra_fields": ["worker_id"]}},
        )
        history.append({"role": "assistant", "content": answer.choices[0].message.content})
        worker = answer.model_extra["nvext"]["worker_id"]["decode_worker_id"]
        cached = answer.usage.prompt_tokens_details.cached_tokens
        print(f"worker {worker}: {answer.usage.prompt_tokens} prompt tokens, {cached} cached")


if __name__ == "__main__":
    main(*sys.argv[1:3])
