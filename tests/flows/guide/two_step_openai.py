"""The guide's two-step program: prefill's token ids and blocks handed to decode by an OpenAI client."""

import os

from openai import OpenAI

MODEL = os.environ["MODEL"]
messages = [{"role": "user", "content": "What is 17 * 23?"}]

prefill_client = OpenAI(base_url=os.environ["PREFILL"] + "/v1", api_key="EMPTY")
decode_client = OpenAI(base_url=os.environ["DECODE"] + "/v1", api_key="EMPTY")

prefill = prefill_client.chat.completions.create(
    model=MODEL,
    messages=messages,
    max_tokens=1,
    extra_body={"return_token_ids": True, "kv_transfer_params": {"do_remote_decode": True}},
)

# prefill's kv_transfer_params point decode at its blocks; add the token IDs on top
decode = decode_client.chat.completions.create(
    model=MODEL,
    messages=messages,
    stream=True,
    extra_body={"kv_transfer_params": {**prefill.kv_transfer_params, "prompt_token_ids": prefill.prompt_token_ids}},
)

for chunk in decode:
    for choice in chunk.choices:
        print(choice.delta.content or "", end="", flush=True)
