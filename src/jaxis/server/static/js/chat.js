// The conversation on the page: its messages, and the answers that are being written.

import { ApiError } from "./api.js";
import { byId, copyText, newId, toast } from "./dom.js";
import { Follower } from "./follow.js";
import { generate, requestMessages } from "./generation.js";
import { MessageView } from "./message-view.js";
import { newConversation, titleOf } from "./store.js";

const SAVE_INTERVAL_MS = 1000;
const RENDER_INTERVAL_MS = 50;
const RENDER_SHARE = 0.2; // of the time, at most: a long code block takes a while

/**
 * Fires "changed" when a conversation was opened, created or renamed, or its run began or ended, "unauthorized" at a 401, and
 * "lost" when the server or its model is not there any more.
 */
export class Chat extends EventTarget {
  /** @param {() => string} getModel gives the model to ask for */
  constructor(api, store, settings, getModel) {
    super();
    Object.assign(this, { api, store, settings, getModel });
    this.conversation = null; // null: a new one, which is stored with its first message
    this.runs = new Map(); // conversation id to its {message, controller, waitSeconds}
    this.views = new Map(); // message id to its view
    this.log = byId("log");
    this.messages = byId("messages");
    this.follower = new Follower(this.log, this.messages, byId("to-end"));
    this.messages.addEventListener("click", copyCode);
  }

  get run() {
    return this.conversation ? this.runs.get(this.conversation.id) : undefined;
  }

  get systemPrompt() {
    return this.conversation?.systemPrompt ?? this.settings.systemPrompt;
  }

  /** Shows a conversation; null is a new one. */
  open(conversation) {
    this.conversation = conversation;
    this.views.clear();
    this.messages.replaceChildren();
    for (const message of conversation?.messages ?? []) this.#addView(message);
    this.#updateAll();
    this.follower.toEnd();
    this.#changed();
  }

  /** Sends a message of the user's; images are data: URLs. */
  send(text, images = []) {
    if (this.run) return;
    if (this.conversation === null) this.conversation = newConversation(this.settings.systemPrompt);
    this.#append(userMessage(text, images));
    this.#answer();
  }

  stop() {
    this.run?.controller.abort();
  }

  /** When the page is left: browsers may keep it, and its requests, for the way back. */
  stopAll() {
    for (const [id, { message, controller }] of this.runs) {
      message.finish_reason = "abort";
      this.store.put(this.store.get(id));
      controller.abort();
    }
  }

  setSystemPrompt(text) {
    if (this.conversation === null || this.conversation.systemPrompt === text) return;
    this.conversation.systemPrompt = text;
    this.store.put(this.conversation);
  }

  #actions = {
    retry: (message) => this.#answerAgain(message),
    continueAnswer: (message) => this.#runAnswer(message, true),
    edit: (message, text) => this.#edit(message, text),
    branch: (message) => this.#branch(message),
    answerTool: (message, call, result) => this.#answerTool(message, call, result),
  };

  #append(message) {
    this.conversation.messages.push(message);
    if (!this.conversation.isNamed) this.conversation.title = titleOf(this.conversation);
    this.#addView(message);
  }

  #addView(message) {
    const view = new MessageView(message, this.#actions);
    this.views.set(message.id, view);
    this.messages.append(view.element);
  }

  /** Removes the messages from an index on; the user can have them back. */
  #truncate(index) {
    const { conversation } = this;
    const before = conversation.messages;
    const removed = before.slice(index);
    conversation.messages = before.slice(0, index);
    for (const message of removed) {
      this.views.get(message.id)?.element.remove();
      this.views.delete(message.id);
    }
    const isNothing = ({ content, images, reasoning_content, tool_calls }) =>
      !content && !images && !reasoning_content && !tool_calls;
    if (removed.every(isNothing)) return; // a request that failed, say
    const undo = () => {
      this.runs.get(conversation.id)?.controller.abort();
      conversation.messages = before;
      this.store.put(conversation);
      if (this.conversation === conversation) this.open(conversation);
    };
    toast(removed.length === 1 ? "A message was replaced." : `${removed.length} messages were replaced.`, {
      label: "Undo",
      run: undo,
    });
  }

  #answerAgain(message) {
    if (this.run) return;
    const index = this.conversation.messages.indexOf(message);
    this.#truncate(message.role === "assistant" ? index : index + 1);
    this.#answer();
  }

  /** Returns whether the edit is done, or there is nothing to do. */
  #edit(message, text) {
    const { conversation } = this;
    if (text === message.content || !text.trim()) return true;
    if (this.run) {
      toast("An answer is being written: stop it first, or wait.", null, 4);
      return false;
    }
    const index = conversation.messages.indexOf(message);
    if (message.role === "user") {
      this.#truncate(index);
      this.#append(userMessage(text, message.images));
      this.#answer();
      return true;
    }
    conversation.messages[index] = { ...message, content: text };
    delete conversation.messages[index].stats; // they were of another text
    this.store.put(conversation);
    this.open(conversation);
    return true;
  }

  #branch(message) {
    const { conversation } = this;
    const end = conversation.messages.indexOf(message) + 1;
    const branch = newConversation(conversation.systemPrompt);
    branch.title = `${conversation.title} (branch)`;
    branch.isNamed = true;
    branch.messages = structuredClone(conversation.messages.slice(0, end));
    this.store.put(branch);
    this.open(branch);
  }

  #answerTool(message, call, result) {
    if (this.run) return;
    this.#append({ id: newId(), role: "tool", content: result, tool_call_id: call.id });
    if (this.#openCalls(message).length === 0) this.#answer();
    else {
      this.store.put(this.conversation);
      this.#updateAll();
    }
  }

  #answer() {
    const message = { id: newId(), role: "assistant", content: "" };
    this.#append(message);
    this.follower.toEnd();
    this.#runAnswer(message, false);
  }

  async #runAnswer(message, isContinued) {
    if (this.run) return;
    const { conversation } = this;
    const run = { message, controller: new AbortController(), waitSeconds: null };
    this.runs.set(conversation.id, run);
    this.store.inUse.add(conversation.id);
    delete message.error;
    delete message.finish_reason;
    message.model = this.getModel();
    conversation.updatedAt = Date.now();
    const index = conversation.messages.indexOf(message);
    const body = {
      model: message.model,
      messages: requestMessages(conversation, isContinued ? index + 1 : index),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      ...(isContinued ? { continue_final_message: true, add_generation_prompt: false } : {}),
      ...this.settings.requestFields(),
    };
    const onUpdate = this.#updater(conversation, run);
    this.store.put(conversation);
    this.#updateAll();
    this.#changed();
    announce("Answering.");
    try {
      await generate(this.api, body, message, run.controller.signal, onUpdate);
      announce("The answer is complete.");
    } catch (error) {
      if (error.name === "AbortError") {
        message.finish_reason = "abort";
        announce("Stopped.");
      } else {
        message.error = error.message;
        announce("The request failed.");
        if (!(error instanceof ApiError)) throw error;
        if (error.status === 0 || error.status === 404) this.dispatchEvent(new Event("lost"));
        if (error.status === 401)
          this.dispatchEvent(new CustomEvent("unauthorized", { detail: { message, conversation } }));
      }
    } finally {
      this.runs.delete(conversation.id);
      this.store.inUse.delete(conversation.id);
      conversation.updatedAt = Date.now();
      // Unless it was deleted meanwhile.
      if (this.store.get(conversation.id) === conversation) this.store.put(conversation);
      if (this.conversation === conversation) this.#updateAll();
      this.#changed();
    }
  }

  /** What to do with every chunk: shows and saves the message, neither too often. */
  #updater(conversation, run) {
    let frame = null;
    let nextRender = 0;
    let saved = Date.now();
    const show = () => {
      frame = null;
      const start = performance.now();
      if (start < nextRender) {
        frame = requestAnimationFrame(show);
        return;
      }
      if (this.conversation === conversation && this.runs.get(conversation.id) === run) this.#update(run.message);
      nextRender = start + Math.max(RENDER_INTERVAL_MS, (performance.now() - start) / RENDER_SHARE);
    };
    return (waitSeconds) => {
      run.waitSeconds = waitSeconds;
      frame ??= requestAnimationFrame(show);
      if (Date.now() - saved > SAVE_INTERVAL_MS && this.store.get(conversation.id) === conversation) {
        saved = Date.now();
        this.store.put(conversation);
      }
    };
  }

  /** Tries again what failed for want of the right API key. */
  retryUnauthorized({ message, conversation }) {
    if (this.conversation === conversation && conversation.messages.at(-1) === message && message.error)
      this.#runAnswer(message, false);
  }

  #openCalls(message) {
    const answered = new Set(
      this.conversation.messages.filter(({ role }) => role === "tool").map((result) => result.tool_call_id),
    );
    return (message.tool_calls ?? []).filter((call) => call && !answered.has(call.id));
  }

  #update(message) {
    const run = this.run?.message === message ? this.run : null;
    this.views.get(message.id)?.update({
      isRunning: run !== null,
      isBusy: Boolean(this.run),
      waitSeconds: run?.waitSeconds ?? null,
      isLast: this.conversation.messages.at(-1) === message,
      openCalls: this.#openCalls(message),
    });
  }

  #updateAll() {
    for (const message of this.conversation?.messages ?? []) this.#update(message);
    this.log.setAttribute("aria-busy", this.run ? "true" : "false");
    this.log.classList.toggle("busy", Boolean(this.run));
    this.messages.classList.toggle("empty", !this.conversation?.messages.length);
  }

  #changed() {
    this.dispatchEvent(new Event("changed"));
  }
}

async function copyCode(event) {
  const button = event.target.closest(".copy-code");
  if (!button) return;
  await copyText(button.closest(".code-block").querySelector("code").textContent.replace(/\n$/, ""));
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function announce(text) {
  byId("announcer").textContent = text;
}

function userMessage(content, images) {
  return { id: newId(), role: "user", content, ...(images?.length ? { images } : {}) };
}
