"""An agent of the ``openai`` package that answers a question by looking words up; it knows nothing of training.

``examples/look_up.py`` trains the policy behind it. Each run is one episode: the row comes by ``RLOX_ROW_FILE``, the
endpoint by ``OPENAI_BASE_URL`` and ``OPENAI_API_KEY``, and the last line of stdout is the reward.
"""

import json
import os

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a word up in the table.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]
MAX_TURNS = 4


def main() -> None:
    """Play one episode."""
    with open(os.environ["RLOX_ROW_FILE"], encoding="utf-8") as file:
        row = json.load(file)
    client = OpenAI()
    messages = [{"role": "user", "content": row["question"]}]
    answer, look_ups = None, 0
    for _ in range(MAX_TURNS):
        message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            answer = (message.content or "").strip()
            break
        messages.append(message)
        for call in message.tool_calls:
            key = json.loads(call.function.arguments).get("key")
            found = row["table"].get(str(key), "nothing")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
            look_ups += 1
    print(json.dumps({"reward": float(answer == row["answer"]), "metrics": {"look_ups": look_ups}}))


if __name__ == "__main__":
    main()
