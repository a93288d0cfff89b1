from __future__ import annotations

from typing import ClassVar

from jaxis.parsing.reasoning_parsers.base import ReasoningMarks, ReasoningParser
from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.kimi_k3 import KIMI_K3_DROPPED, KIMI_K3_RESPONSE, KIMI_K3_TOOLS


class ThinkReasoningParser(ReasoningParser):
    """DeepSeek R1 and V3.1, Qwen 3 and 3.5, MiniMax M2, Nemotron 3. The tags are not special tokens.

    The opening tag is the first thing the model writes, or the template puts it at the end of the prompt; a tag
    anywhere else is content. Reasoning that is cut off by the end of the text is still reasoning.
    """

    opening: ClassVar[str] = "<think>"
    closings: ClassVar[tuple[str, ...]] = ("</think>",)

    def _read(self) -> Reading[None]:
        opened = self.opened_by(self._prompt)
        self._reader.record()
        yield from self._reader.skip_space()
        space = self._reader.recorded()
        if (yield from self._take_opening()) or opened:
            yield from self._read_reasoning()
            yield from self._reader.skip_space()
        else:
            self._add_content(space)
        yield from self._read_answer()

    def _take_opening(self) -> Reading[bool]:
        begins = yield from self._reader.comes(self.opening)
        if begins:
            self._reader.skip(len(self.opening))
        return begins

    def _read_answer(self) -> Reading[None]:
        while (yield from self._reader.until(self.dropped, self._add_content)) is not None:
            pass

    def _read_reasoning(self) -> Reading[None]:
        markers = (*self.closings, *self.interruptions, *self.dropped, *self._tool_dropped)
        while (marker := (yield from self._reader.until(markers, self._add_reasoning))) is not None:
            if marker in self.interruptions:
                self._reader.unread(marker)
            if marker in (*self.closings, *self.interruptions):
                return


class GLMReasoningParser(ThinkReasoningParser):
    """GLM 4.5 and later, Ling 3, which may call from within their reasoning: a call is a special token."""

    interruptions = ("<tool_call>",)


class KimiReasoningParser(ThinkReasoningParser):
    """Kimi K2 Thinking and K2.5, which may call from within their reasoning: a call is a special token."""

    interruptions = ("<|tool_calls_section_begin|>",)


class KimiK3ReasoningParser(ThinkReasoningParser):
    """Kimi K3: a channel of its own before that of the answer, in which the grammar of an answer begins."""

    needs_special_tokens = True
    opening = "<|open|>think<|sep|>"
    closings = (f"<|close|>think<|sep|>{KIMI_K3_RESPONSE}",)
    dropped = KIMI_K3_DROPPED

    @classmethod
    def marks_before_answer(cls, prompt: str) -> ReasoningMarks | None:
        return None if prompt.endswith(KIMI_K3_RESPONSE) else super().marks_before_answer(prompt)

    def _read_reasoning(self) -> Reading[None]:
        markers = ("<|close|>think<|sep|>", KIMI_K3_RESPONSE, KIMI_K3_TOOLS, "<|end_of_msg|>")
        if (yield from self._reader.until(markers, self._add_reasoning)) == KIMI_K3_TOOLS:
            self._reader.unread(KIMI_K3_TOOLS)


class HunyuanV3ReasoningParser(ThinkReasoningParser):
    """Hy3 and Hy4."""

    suffixed = ("opening", "closings")


class MiniMaxM3ReasoningParser(ThinkReasoningParser):
    """MiniMax M3, which begins an answer with the closing tag where it chooses not to reason."""

    opening = "<mm:think>"
    closings = ("</mm:think>",)

    def _take_opening(self) -> Reading[bool]:
        return (yield from self._reader.comes(self.closings[0])) or (yield from super()._take_opening())


class SeedOssReasoningParser(ThinkReasoningParser):
    """Seed-OSS. With a thinking budget, the reasoning has notes on it between tags of their own; the notes stay.

    With a budget of zero the template opens the reasoning and a first note.
    """

    needs_special_tokens = True
    opening = "<seed:think>"
    closings = ("</seed:think>",)
    dropped = ("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>", "<seed:eos>")

    @classmethod
    def opened_by(cls, prompt: str) -> bool:
        return super().opened_by(prompt.rstrip().removesuffix("<seed:cot_budget_reflect>"))


class ApertusReasoningParser(ThinkReasoningParser):
    """Apertus. The tags are special tokens."""

    needs_special_tokens = True
    opening = "<|inner_prefix|>"
    closings = ("<|inner_suffix|>",)
    dropped = ("<|assistant_end|>",)


class MiniCPMReasoningParser(ThinkReasoningParser):
    """MiniCPM3. The tags are special tokens."""

    needs_special_tokens = True
    opening = "<|thought_start|>"
    closings = ("<|thought_end|>",)
    dropped = ("<|im_end|>", "</s>")


class MistralReasoningParser(ThinkReasoningParser):
    """Magistral. The tags are special tokens."""

    needs_special_tokens = True
    dropped = ("</s>",)
    opening = "[THINK]"
    closings = ("[/THINK]",)


class Gemma4ReasoningParser(ThinkReasoningParser):
    """Gemma 4. All markers are special tokens but the channel's name."""

    needs_special_tokens = True
    dropped = ("<turn|>", "<eos>")
    opening = "<|channel>thought"
    closings = ("<channel|>",)


class CohereReasoningParser(ThinkReasoningParser):
    """Command R7B, Command A and later. All markers are special tokens; the answer has markers of its own."""

    needs_special_tokens = True
    opening = "<|START_THINKING|>"
    closings = ("<|END_THINKING|>",)
    answer_openings = ("<|START_RESPONSE|>", "<|START_TEXT|>")
    dropped = (*answer_openings, "<|END_RESPONSE|>", "<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>")
