# SPDX-License-Identifier: Apache-2.0
"""Long documents with facts planted in them, and the questions that ask for those facts.

The filler is plain English made from templates: deterministic for a seed, varied, and free of digits, so a number in an
answer can come only from a planted fact. Used by the demo and by the engine tests:

    prompt, answer = needle_prompt(tokenizer, num_tokens=4000, depth=0.25, index=3)
    assert answer in LLM(...).generate(prompt)[0].outputs[0].text
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

NUM_NEEDLES = 12
ANSWER_TOKENS = 12  # enough for an answer when it is generated after `Fact.answer_start`

_COLOURS = ("red", "blue", "green", "yellow", "purple", "orange", "white", "black", "silver", "golden", "brown", "pink")
_OBJECTS = (
    *("lighthouse", "piano", "submarine", "castle", "telescope", "bicycle"),
    *("umbrella", "rocket", "violin", "train", "camera", "elephant"),
)

_PEOPLE = (
    *("the baker", "an old fisherman", "the schoolteacher", "a young painter", "the postman", "my neighbour"),
    *("the librarian", "a travelling musician", "the gardener", "a tired nurse", "the carpenter", "her grandmother"),
    *("the shepherd", "a quiet student", "the innkeeper", "a retired sailor"),
)
_ACTIONS = (
    *("walked slowly", "waited for a friend", "read a long letter", "sang an old song", "ate bread and cheese"),
    *("talked about the weather", "mended a broken chair", "looked for a lost dog", "planted a row of beans"),
    *("told a story about the sea", "made a pot of tea", "counted the passing carts", "wrote in a small notebook"),
    *("listened to the rain", "carried a basket of apples", "fell asleep"),
)
_PLACES = (
    *("near the harbour", "behind the church", "on the stone bridge", "at the edge of the forest", "in the market"),
    *("beside the mill", "under the chestnut trees", "by the railway station", "along the river", "in the kitchen"),
    *("on top of the hill", "outside the village hall", "next to the well", "at the end of the lane"),
)
_TIMES = (
    *("in the morning", "after lunch", "before sunset", "during the winter", "late at night", "at the weekend"),
    *("when the snow had melted", "once the guests had left", "on the first day of spring", "while the bells rang"),
    *("every other week", "as soon as the shop closed"),
)
_THINGS = (
    *("the roof of the barn", "the garden wall", "the road to the valley", "the old clock", "the wooden gate"),
    *("the field of barley", "the ferry", "the path through the orchard", "the bakery window", "the water wheel"),
    *("the room upstairs", "the bench in the square", "the little boat", "the chimney"),
)
_STATES = (
    *("was covered in leaves", "needed a new coat of paint", "looked smaller than before", "stood empty"),
    *("smelled of smoke and honey", "was warm from the sun", "made a strange noise", "had been repaired at last"),
    *("was the pride of the family", "could be seen from far away", "was damp and cold", "belonged to nobody"),
)
_REASONS = (
    *("because the wind had turned", "although nobody had asked", "since there was time to spare", "and nobody minded"),
    *("so the children laughed", "as people often do there", "but it did not matter much", "and the day went on"),
)
_TEMPLATES = (
    "{time}, {person} {action} {place}.",
    "{person} {action} {place} {reason}.",
    "{thing} {state} {time}.",
    "{person} said that {thing} {state}, {reason}.",
    "{thing} {place} {state}, and {person} {action}.",
    "{person} and {other} met {place} {time}.",
    "{time}, {thing} {state} {reason}.",
    "nobody remembered why {person} {action} {time}.",
    "{person} {action}, {reason}, while {other} {other_action} {place}.",
    "it was said that {thing} {state} whenever {person} {action}.",
)


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that this module uses."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of `text`."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """The conversation as the model was trained to see it."""
        ...


@dataclass(frozen=True)
class Fact:
    """A secret code to plant in a document.

    `depth` is where: 0.0 is the document's first sentence, 1.0 its last.
    """

    colour: str
    object: str
    number: str
    depth: float

    @property
    def subject(self) -> str:
        """What the code belongs to."""
        return f"{self.colour} {self.object}"

    @property
    def sentence(self) -> str:
        """The sentence to plant."""
        return f"{self.answer_start} {self.number}."

    @property
    def question(self) -> str:
        """The question that asks for the number."""
        return f"What is the secret code of the {self.subject}?"

    @property
    def answer_start(self) -> str:
        """How the assistant's answer begins: a small model that continues from here answers with the number only."""
        return f"The secret code of the {self.subject} is:"


def make_fact(index: int, depth: float) -> Fact:
    """Fact number `index`: the first 12 share neither colour nor object, and each has its own four-digit number.

    Four digits, all different, are what the demo model copies reliably when only 400 to 500 tokens of the document are kept: of
    five it then drops the last one in a quarter of the documents, and equal digits make it jump from one to the other.
    """
    number = "".join(random.Random(f"fact {index}").sample("123456789", 4))
    colour = _COLOURS[index % len(_COLOURS)]
    thing = _OBJECTS[(index + index // len(_OBJECTS)) % len(_OBJECTS)]
    return Fact(colour, thing, number, depth)


def needle_depths(count: int = NUM_NEEDLES) -> list[float]:
    """`count` depths from just after the start to just before the end, evenly spaced."""
    return [(i + 0.5) / count for i in range(count)]


def filler_sentences(seed: int) -> Iterator[str]:
    """Endless sentences of filler; the same for the same seed, and no two neighbours from one template."""
    rng = random.Random(seed)
    previous = ""
    while True:
        template = rng.choice([t for t in _TEMPLATES if t != previous])
        previous = template
        person, other = rng.sample(_PEOPLE, 2)
        action, other_action = rng.sample(_ACTIONS, 2)
        sentence = template.format(
            person=person,
            other=other,
            action=action,
            other_action=other_action,
            place=rng.choice(_PLACES),
            time=rng.choice(_TIMES),
            thing=rng.choice(_THINGS),
            state=rng.choice(_STATES),
            reason=rng.choice(_REASONS),
        )
        yield sentence[0].upper() + sentence[1:]


def make_document(num_tokens: int, tokenizer: Tokenizer, facts: Sequence[Fact], seed: int) -> str:
    """Filler with `facts` planted at their depths: as many whole sentences as fit into `num_tokens` tokens.

    Raises ValueError if the facts alone do not fit.
    """
    room = num_tokens - sum(_count(tokenizer, fact.sentence) for fact in facts)
    if room < 0:
        raise ValueError(f"{len(facts)} facts do not fit into {num_tokens} tokens")
    sentences: list[str] = []
    for sentence in filler_sentences(seed):
        room -= _count(tokenizer, sentence)
        if room < 0:
            break
        sentences.append(sentence)
    filler_length = len(sentences)
    for fact in sorted(facts, key=lambda fact: fact.depth, reverse=True):  # from the back, so that indices stay right
        sentences.insert(round(fact.depth * filler_length), fact.sentence)
    return " ".join(sentences)


def question_prompt(document: str, fact: Fact) -> str:
    """The user's message: `document`, then the question about `fact`.

    The wording is measured, not free: with dense attention at 7K tokens the demo model finds 12 of 12 codes with it,
    and only 4 without the last sentence and the colon of `Fact.answer_start`.
    """
    question = f"Question: {fact.question} Answer with the number only."
    return f"Read this text and remember the secret code.\n\n{document}\n\n{question}"


def needle_prompt(
    tokenizer: Tokenizer, num_tokens: int, depth: float, index: int, distractors: int = 0
) -> tuple[str, str]:
    """A prompt of at most `num_tokens` tokens (at least all but a sentence of them) and the answer it asks for.

    The prompt holds fact number `index` at `depth` and ends inside the assistant's turn, at `Fact.answer_start`:
    greedy generation of `ANSWER_TOKENS` tokens continues with the answer. With `distractors`, that many other facts
    are planted too, at depths spread over the document.
    """
    fact = make_fact(index, depth)
    others = [make_fact(index + 1 + i, needle_depths(distractors)[i]) for i in range(distractors)]
    frame = len(tokenizer.encode(_chat_prompt(tokenizer, "x", fact), add_special_tokens=False))
    document = make_document(num_tokens - frame, tokenizer, [fact, *others], seed=index)
    return _chat_prompt(tokenizer, document, fact), fact.number


def _chat_prompt(tokenizer: Tokenizer, document: str, fact: Fact) -> str:
    messages = [{"role": "user", "content": question_prompt(document, fact)}]
    prompt: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return prompt + fact.answer_start


def _count(tokenizer: Tokenizer, text: str) -> int:
    """Tokens of a sentence inside a document, where a space precedes it."""
    return len(tokenizer.encode(" " + text, add_special_tokens=False))
