"""Reasoning between tags, or after words that announce it."""

from __future__ import annotations

from typing import ClassVar

from jaxis.parsing.harmony import MESSAGE, read_first_recipient, read_header
from jaxis.parsing.reasoning_parsers.base import ReasoningMarks, ReasoningParser
from jaxis.parsing.text_reader import Reading
from jaxis.parsing.tool_parsers.call_list import GraniteToolParser
from jaxis.parsing.tool_parsers.invocations import MUSE_ENDS, MUSE_NO_TOOLS

# Reasoning between tags at the beginning of the answer.


class ThinkReasoningParser(ReasoningParser):
    """DeepSeek R1 and V3.1, Qwen 3 and 3.5, GLM 4.5, MiniMax M2, Nemotron 3. The tags are not special tokens.

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
        """Takes the marker that opens the reasoning if it comes next."""
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


class KimiReasoningParser(ThinkReasoningParser):
    """Kimi K2 Thinking and K2.5, which may call from within their reasoning: a call is a special token."""

    interruptions = ("<|tool_calls_section_begin|>",)


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


# Reasoning after which the answer is between tags too: `<think>...</think><response>...</response>`.


class AnswerTagsReasoningParser(ThinkReasoningParser):
    """Takes the tags out. The closing one is removed at the end of an answer that the opening one opened, and before a
    call; anywhere else it is content.

    Attributes:
      answer_tags: Those around the answer.
      call_openers: The markers with which the model's tool parser begins a call.
    """

    answer_tags: ClassVar[tuple[str, str]]
    call_openers: ClassVar[tuple[str, ...]]

    def _read_answer(self) -> Reading[None]:
        opening, closing = self.answer_tags
        if not (yield from self._reader.comes(opening)):
            yield from super()._read_answer()
            return
        self._reader.skip(len(opening))
        yield from self._reader.skip_space()
        held = ""  # white space, then the closing tag and what white space follows it: content if more text comes
        closed = False

        def take(text: str) -> None:
            nonlocal held, closed
            if closed and not text.strip():
                held += text
                return
            text, closed = held + text, False
            content = text.rstrip()
            held = text[len(content) :]
            self._add_content(content)

        markers = (closing, *self.call_openers, *self.dropped, *self._tool_dropped)
        while (marker := (yield from self._reader.until(markers, take))) is not None:
            if marker == closing:
                if closed:
                    self._add_content(held)
                    held = ""
                held, closed = held + marker, True
            elif marker in self.call_openers:
                self._add_content((held[: held.index(closing)] if closed else held) + marker)
                held, closed = "", False
        if not closed:
            self._add_content(held)


class HunyuanReasoningParser(AnswerTagsReasoningParser):
    """Hunyuan A13B and the dense ones: `<think>\\n...\\n</think>\\n<answer>\\n...\\n</answer>`."""

    answer_tags = ("<answer>", "</answer>")
    call_openers = ("<tool_calls>",)


class ErnieReasoningParser(AnswerTagsReasoningParser):
    """ERNIE 4.5 Thinking: `<think>\\n...\\n</think>\\n\\n<response>\\n...\\n</response>`."""

    answer_tags = ("<response>", "</response>")
    call_openers = ("<tool_call>",)


# Granite 3: the reasoning after a phrase (3.1, 3.2) or between tags (3.3).


class GraniteReasoningParser(AnswerTagsReasoningParser):
    """Granite 3.1 to 3.3: `Here is my thought process: ... Here is my response: ...`, or
    `<think>...</think><response>...</response>`. Nothing here is a special token.
    """

    opening = "<think>"
    closings = ("</think>", "Here is my response:", "Here's my response:")
    more_openings: ClassVar[dict[str, str]] = {
        "Here is my thought process:": "Here is my response:",
        "Here's my thought process:": "Here's my response:",
    }
    answer_tags = ("<response>", "</response>")
    call_openers = GraniteToolParser.openers

    def _take_opening(self) -> Reading[bool]:
        for opening in (self.opening, *self.more_openings):
            if (yield from self._reader.comes(opening)):
                self._reader.skip(len(opening))
                return True
        return False


# Muse Glimmer: the reasoning is what the model writes to itself.


_START = "<|start|>"


class MuseGlimmerReasoningParser(ReasoningParser):
    """Removes the headers of all messages except those to tools, which the tool parser reads."""

    needs_special_tokens = True
    closings = ("<|start|>assistant to=user<|message|>",)

    @classmethod
    def marks(cls, prompt: str) -> ReasoningMarks | None:
        """See `ReasoningParser.marks`: each message to itself is reasoning."""
        opening = f"to=self{MESSAGE}"
        return ReasoningMarks(
            opened=prompt.rstrip().endswith(opening),
            openings=(opening,),
            ends=(MUSE_ENDS[0],),
            closings=(*MUSE_ENDS, _START),
            repeats=True,
            refused=("to=", "self"),
        )

    def _read(self) -> Reading[None]:
        if opener := (yield from read_first_recipient(self._reader)):
            yield from self._read_message(opener)
        while (marker := (yield from self._reader.until((_START, *MUSE_ENDS), self._add_content))) is not None:
            if marker == _START:
                yield from self._read_message(marker)

    def _read_message(self, opener: str) -> Reading[None]:
        header = yield from read_header(self._reader, opener, MUSE_ENDS)
        if not header.complete:
            self._add_content(header.text)
            return
        take = self._add_content
        if header.function == "self":
            self._space = "\n" if self._reasoned else ""
            take = self._add_reasoning
        is_call = header.function not in MUSE_NO_TOOLS
        if is_call:
            # The tool parser knows a header by its beginning, which the prompt has of the first one.
            self._add_content(
                header.text if header.text.startswith(_START) else f"{_START}assistant {header.text.strip()}"
            )
        marker = yield from self._reader.until((_START, *MUSE_ENDS), take)
        if marker == _START:
            self._reader.unread(marker)
        elif is_call and marker is not None:
            self._add_content(marker)
