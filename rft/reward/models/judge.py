"""A language model as the judge of answers, such as `algorithm=generative_reward_model` trains or any that can chat."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from rft.actor.forward.logits import forbidden_tokens
from rft.actor.init import language_model_class, own_class
from rft.actor.model import end_tokens
from rft.batch.encoded import EncodedText
from rft.ranges import PositiveInt
from rft.reward.models.base import ModelTerm, ModelTermOptions
from rft.reward.models.grade import Grade, about_one


@dataclass(frozen=True)
class JudgeOptions(ModelTermOptions):
    """The options of `Judge`.

    Attributes:
        path: a folder or hub name of a language model and its tokenizer.
        question: the question about a response, see `Question`; its words are one token each.
        template, template_arguments, system: how the question is rendered, as in `Encoder`.
    """

    question: dict[str, Any]


class Judge(ModelTerm):
    """P(good) / (P(good) + P(not good)) of the judge's next token (arXiv 2408.15240, section 3.1).

    Raises:
        ValueError: the question is not about one response; names the key.
    """

    Options: ClassVar[type[ModelTermOptions]] = JudgeOptions
    shards: ClassVar[bool] = True

    def __init__(self, key: str, options: JudgeOptions) -> None:
        super().__init__(key, options)
        self._question = about_one(options.question, key)
        self.reads = self._question.reads

    @property
    def _auto_class(self) -> Any:
        return language_model_class(self._config)

    def _check_config(self) -> None:
        kinds = self._config.architectures or []
        known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values()}
        if not {*kinds} & known and not own_class(self._config, self._auto_class):
            raise ValueError(
                f"{self._key}.path={self.options.path}: {', '.join(kinds) or 'a model without a name'} is not a "
                "language model; reward/terms=[model] accepts models that return scores"
            )

    def _tokenized(self) -> object:
        return self._verdicts  # each of the two words is one token

    @torch.no_grad()
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        return [float(score) for score in self._outputs(lambda: self._questions(responses, rows))]

    def _forward(self, model: PreTrainedModel, texts: list[EncodedText]) -> Tensor:
        """The probability (N,) of the good verdict after N questions."""
        good, bad = self._verdicts
        inputs = self._inputs(texts, model, left=True)
        if self._processor is None:  # a model with media counts positions in its own way, and by distance alone
            inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        logits = model(**inputs, logits_to_keep=1).logits
        odds = logits[:, -1, good].float() - logits[:, -1, bad].float()
        return odds.sigmoid().cpu()

    def _questions(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[EncodedText]:
        asked = [self._question.ask(row, response=text) for text, row in zip(responses, rows, strict=True)]
        return self._encoder.prompts([{"prompt": text} for text in asked])

    @cached_property
    def _verdicts(self) -> tuple[int, int]:
        """The tokens of the two words, as they follow a question in training."""
        question = self._question.ask({"prompt": "0", "answer": "0"}, response="0")
        verdicts = []
        for word in self._question.words:
            ids, trains = self._encoder.example({"prompt": question, "response": word})
            tokens = [token for token, is_verdict in zip(ids, trains, strict=True) if is_verdict][:-1]
            if len(tokens) != 1 or tokens[0] == self._tokenizer.unk_token_id:
                count = f"{len(tokens)} tokens" if len(tokens) != 1 else "unknown"
                raise ValueError(
                    f"{self._key}.question.words: {word!r} is {count} to the tokenizer of {self.options.path}; the "
                    "verdict is read from one token: choose another word, or reward/terms=[judge_text]"
                )
            verdicts += tokens
        if verdicts[0] == verdicts[1]:
            raise ValueError(f"{self._key}.question.words={self._question.words}: both are the same token; change one")
        return verdicts[0], verdicts[1]


@dataclass(frozen=True)
class WritingJudgeOptions(JudgeOptions):
    """The options of `WritingJudge`.

    Attributes:
        question: as in `Judge`; the words may be of any length.
        grade: how the text becomes a number, see `Grade`.
        max_new_tokens: of the judge's text.
    """

    grade: dict[str, Any]
    max_new_tokens: PositiveInt


class WritingJudge(Judge):
    """Generates a text greedily, such as reasoning and a verdict, and reads it with a regular expression."""

    Options = WritingJudgeOptions
    options: WritingJudgeOptions
    shards: ClassVar[bool] = False  # a text is as many forwards as it has tokens

    def __init__(self, key: str, options: WritingJudgeOptions) -> None:
        super().__init__(key, options)
        self._grade = Grade.of(options.grade, self._question.words, f"{key}.grade")

    def _tokenized(self) -> object:
        return self._encoder

    @torch.no_grad()
    def values(self, responses: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
        questions = self._questions(responses, rows)
        scores = [0.0] * len(questions)
        with self._model.loaded() as model:
            for chosen in self._forwards([len(question) + self.options.max_new_tokens for question in questions]):
                inputs = self._inputs([questions[n] for n in chosen], model, left=True)
                written = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :]
                texts = self._tokenizer.batch_decode(written, skip_special_tokens=True)
                for n, text in zip(chosen, texts, strict=True):
                    scores[n] = self._grade(text)
        return scores

    def _configure(self, model: PreTrainedModel) -> None:
        media = None if self._processor is None else self._processor.facts
        forbidden = forbidden_tokens(len(model.get_output_embeddings().weight), self._tokenizer, media)
        model.generation_config = GenerationConfig(
            do_sample=False,
            max_new_tokens=self.options.max_new_tokens,
            eos_token_id=sorted({*end_tokens(model, self._tokenizer), self._encoder.end}),
            pad_token_id=self._pad,
            suppress_tokens=list(forbidden) or None,
        )
