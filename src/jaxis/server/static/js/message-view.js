// One message on the page.

import { thumbnails } from "./attachments.js";
import { copyText, h, iconButton, toast } from "./dom.js";
import { MarkdownView } from "./markdown.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };

/**
 * A message and its buttons.
 *
 * `actions` has what the buttons do, each called with the message: retry, continueAnswer, branch, edit (with the new text;
 * returns whether it was taken), answerTool (with the call and its result).
 */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.body = h("div", { class: "message-body" });
    this.footer = h("div", { class: "message-foot" });
    this.element = h(
      "article",
      { class: `message ${message.role}`, "aria-label": NAMES[message.role], "data-id": message.id },
      h("h2", { class: "visually-hidden" }, NAMES[message.role]),
      this.body,
      this.footer,
    );
    if (message.role === "assistant") this.#buildAnswer();
    else this.#buildPlain();
  }

  #buildPlain() {
    const { content, images } = this.message;
    if (images?.length) this.body.append(h("ul", { class: "images" }, ...thumbnails(images)));
    if (content || !images?.length) this.body.append(h("div", { class: "plain" }, content));
  }

  #buildAnswer() {
    this.reasoning = h("div", { class: "markdown" });
    this.reasoningSummary = h("summary");
    this.reasoningBlock = h("details", { class: "reasoning", hidden: true }, this.reasoningSummary, this.reasoning);
    this.content = h("div", { class: "markdown content" });
    this.tools = h("div", { class: "tool-calls" });
    this.status = h("div", { class: "status" });
    this.body.append(this.reasoningBlock, this.content, this.tools, this.status);
    this.reasoningMarkdown = new MarkdownView(this.reasoning);
    this.contentMarkdown = new MarkdownView(this.content);
  }

  /**
   * Shows the message as it is now.
   *
   * @param {{isRunning: boolean, isBusy: boolean, waitSeconds: number | null, isLast: boolean, openCalls: object[]}} state
   *   whether it is being written; whether any message is; seconds until the next try; whether it ends the conversation; its
   *   tool calls that have no result yet
   */
  update(state) {
    if (this.message.role === "assistant") this.#updateAnswer(state);
    this.#updateFooter(state);
    this.element.classList.toggle("running", state.isRunning);
  }

  #updateAnswer({ isRunning, isBusy, waitSeconds, openCalls }) {
    const { content, reasoning_content: reasoning, reasoning_seconds: seconds, error } = this.message;
    this.reasoningBlock.hidden = !reasoning;
    if (reasoning) {
      const took = seconds ? ` for ${seconds.toFixed(1)} s` : "";
      this.reasoningSummary.textContent = isRunning && !content ? "Thinking…" : `Thought${took}`;
      this.reasoningMarkdown.render(reasoning);
    }
    this.contentMarkdown.render(content);
    if (this.message.tool_calls) this.#updateToolCalls(isBusy ? [] : openCalls);
    const empty = !content && !reasoning && !this.message.tool_calls?.length;
    this.status.replaceChildren(
      ...(waitSeconds !== null
        ? [h("p", { class: "waiting" }, `The server is busy. Next try in ${waitSeconds} s.`)]
        : []),
      ...(isRunning && empty && waitSeconds === null
        ? [h("p", { class: "pending", "aria-label": "Waiting for the first token" }, h("i"), h("i"), h("i"))]
        : []),
      ...(!isRunning && error ? [this.#errorBox(error)] : []),
      ...(!isRunning && !error && empty
        ? [
            h(
              "p",
              { class: "hint" },
              this.message.finish_reason === "abort" ? "Stopped before the first token." : "The answer is empty.",
            ),
          ]
        : []),
    );
  }

  #errorBox(error) {
    return h(
      "div",
      { class: "error", role: "alert" },
      h("span", {}, error),
      h("button", { type: "button", onclick: () => this.actions.retry(this.message) }, "Retry"),
    );
  }

  #updateToolCalls(openCalls) {
    const parts = this.message.tool_calls.filter(Boolean).map((call) => {
      const box = h(
        "div",
        { class: "tool-call" },
        h("div", { class: "tool-name" }, `Tool call: ${call.function.name}`),
        h("pre", {}, h("code", {}, indented(call.function.arguments))),
      );
      if (openCalls.includes(call)) box.append(this.#resultForm(call));
      return box;
    });
    this.tools.replaceChildren(...parts);
  }

  #resultForm(call) {
    const id = `result-${call.id}`;
    const area = h("textarea", { id, rows: 2, placeholder: "What the tool returned" });
    const onsubmit = (event) => {
      event.preventDefault();
      this.actions.answerTool(this.message, call, area.value);
    };
    return h(
      "form",
      { onsubmit },
      h("label", { for: id, class: "visually-hidden" }, `Result of ${call.function.name}`),
      area,
      h("button", { type: "submit" }, "Send result"),
    );
  }

  #updateFooter({ isRunning, isBusy, isLast }) {
    const stats = this.message.role === "assistant" ? statsLine(this.message, isRunning) : "";
    const buttons = isRunning ? [] : this.#buttons(isBusy, isLast);
    this.footer.replaceChildren(h("div", { class: "actions" }, ...buttons), h("span", { class: "stats" }, stats));
  }

  #buttons(isBusy, isLast) {
    const { message, actions } = this;
    const { role, content, finish_reason: reason } = message;
    const buttons = [];
    if (content) buttons.push(iconButton("copy", "Copy", () => this.#copy()));
    if (!isBusy) {
      if (role !== "tool") buttons.push(iconButton("edit", "Edit", () => this.startEditing()));
      if (role === "assistant") buttons.push(iconButton("retry", "Answer again", () => actions.retry(message)));
      if (role !== "assistant" && isLast) buttons.push(iconButton("retry", "Answer", () => actions.retry(message)));
      if (role === "assistant" && isLast && content && !message.tool_calls && reason !== "stop") {
        buttons.push(iconButton("play", "Continue", () => actions.continueAnswer(message)));
      }
    }
    buttons.push(iconButton("branch", "New conversation from here", () => actions.branch(message)));
    return buttons;
  }

  async #copy() {
    await copyText(this.message.content);
    toast("Copied.", null, 2);
  }

  /** Puts a text field in the message's place. */
  startEditing() {
    const isUser = this.message.role === "user";
    const area = h("textarea", { class: "edit-area", "aria-label": "Edit the message" });
    area.value = this.message.content;
    const stop = () => {
      form.remove();
      this.element.classList.remove("editing");
    };
    const onsubmit = (event) => {
      event.preventDefault();
      if (this.actions.edit(this.message, area.value)) stop();
    };
    const onkeydown = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        stop();
      } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    };
    const cancel = h("button", { type: "button", onclick: stop }, "Cancel");
    const form = h(
      "form",
      { class: "edit-form", onsubmit, onkeydown },
      area,
      h(
        "div",
        { class: "edit-buttons" },
        cancel,
        h("button", { type: "submit", class: "primary" }, isUser ? "Send" : "Save"),
      ),
    );
    this.element.classList.add("editing");
    this.body.before(form);
    area.rows = Math.min(20, Math.max(2, area.value.split("\n").length));
    area.focus();
  }
}

function indented(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json; // not complete yet
  }
}

/** Tokens and speed, and why the answer ended if it did not end by itself. */
function statsLine({ stats, finish_reason: reason }, isRunning) {
  const parts = [];
  if (stats) {
    if (stats.tokens_per_second) parts.push(`${stats.tokens_per_second.toFixed(1)} tokens/s`);
    parts.push(`${stats.completion_tokens} tokens`);
    if (stats.first_token_seconds !== undefined) parts.push(`first after ${stats.first_token_seconds.toFixed(2)} s`);
    parts.push(`prompt ${stats.prompt_tokens}${stats.cached_tokens ? ` (${stats.cached_tokens} cached)` : ""}`);
  }
  if (!isRunning && reason === "length") parts.push("cut at the token limit");
  if (!isRunning && reason === "abort") parts.push("stopped");
  return parts.join(" · ");
}
