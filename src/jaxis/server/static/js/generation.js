// One answer, from its request to its end.

import { ApiError } from "./api.js";
import { apiContent } from "./store.js";

const MAX_RETRIES = 20; // of a request that finds the queue full

/** The conversation's messages up to `end`, as the API takes them. */
export function requestMessages(conversation, end) {
  const messages = conversation.systemPrompt ? [{ role: "system", content: conversation.systemPrompt }] : [];
  for (const message of conversation.messages.slice(0, end)) {
    const { role } = message;
    const content = apiContent(message);
    if (role === "tool") messages.push({ role, content, tool_call_id: message.tool_call_id });
    else if (message.tool_calls?.length) messages.push({ role, content, tool_calls: message.tool_calls });
    else messages.push({ role, content });
  }
  return messages;
}

/**
 * Fills an assistant's message from the server.
 *
 * While the queue is full, waits as long as the server says, and tries again.
 *
 * @param {Api} api
 * @param {object} body of the request
 * @param {object} message gets content, reasoning_content, tool_calls, finish_reason, stats
 * @param {AbortSignal} signal
 * @param {(waitSeconds: number | null) => void} onUpdate after a change; while it waits with the seconds left
 */
export async function generate(api, body, message, signal, onUpdate) {
  for (let numTries = 1; ; numTries++) {
    try {
      await receive(api, body, message, signal, onUpdate);
      return;
    } catch (error) {
      const isFull = error instanceof ApiError && error.status === 429 && error.retryAfterSeconds !== null;
      if (!isFull || numTries > MAX_RETRIES) throw error;
      await countDown(Math.max(1, Math.ceil(error.retryAfterSeconds)), signal, onUpdate);
    }
  }
}

async function receive(api, body, message, signal, onUpdate) {
  const start = performance.now();
  const clock = new TokenClock(start);
  const earlierTokens = message.stats?.completion_tokens ?? 0; // of what is being continued
  for await (const chunk of api.streamChat(body, signal)) {
    const choice = chunk.choices?.[0];
    const isFirst = choice !== undefined && addDelta(message, choice.delta ?? {}, performance.now() - start);
    if (choice?.finish_reason) message.finish_reason = choice.finish_reason;
    if (chunk.usage) {
      clock.note(chunk.usage.completion_tokens, isFirst);
      message.stats = {
        prompt_tokens: chunk.usage.prompt_tokens,
        cached_tokens: chunk.usage.prompt_tokens_details?.cached_tokens ?? 0,
        completion_tokens: earlierTokens + chunk.usage.completion_tokens,
        ...clock.figures(),
      };
    }
    onUpdate(null);
  }
}

/** Adds what a chunk brings to a message; true if it brought anything. */
function addDelta(message, delta, milliseconds) {
  const reasoning = delta.reasoning_content ?? delta.reasoning;
  if (reasoning) message.reasoning_content = (message.reasoning_content ?? "") + reasoning;
  if (delta.content) {
    if (message.reasoning_content && !message.content) message.reasoning_seconds = milliseconds / 1000;
    message.content += delta.content;
  }
  for (const call of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const known = (message.tool_calls[call.index ?? 0] ??= {
      id: "",
      type: "function",
      function: { name: "", arguments: "" },
    });
    if (call.id) known.id = call.id;
    known.function.name += call.function?.name ?? "";
    known.function.arguments += call.function?.arguments ?? "";
  }
  return Boolean(reasoning || delta.content || delta.tool_calls?.length);
}

// Tokens that arrive together, or within a few milliseconds, say nothing about speed.
const MIN_RATE_TOKENS = 8;
const MIN_RATE_SECONDS = 0.1;

/** Measures the time to the first token, and how fast those after it come. */
class TokenClock {
  constructor(start) {
    this.start = start;
    this.first = null;
    this.tokensAtFirst = 0;
  }

  note(numTokens, broughtText) {
    this.last = performance.now();
    this.numTokens = numTokens;
    if (this.first === null && broughtText) {
      this.first = this.last;
      this.tokensAtFirst = numTokens;
    }
  }

  figures() {
    if (this.first === null) return {};
    const seconds = (this.last - this.first) / 1000;
    const numLater = this.numTokens - this.tokensAtFirst;
    return {
      first_token_seconds: (this.first - this.start) / 1000,
      tokens_per_second: numLater >= MIN_RATE_TOKENS && seconds >= MIN_RATE_SECONDS ? numLater / seconds : null,
    };
  }
}

async function countDown(seconds, signal, onUpdate) {
  for (let left = seconds; left > 0; left--) {
    onUpdate(left);
    await new Promise((resolve, reject) => {
      const abort = () => {
        clearTimeout(timer);
        reject(new DOMException("stopped", "AbortError"));
      };
      const timer = setTimeout(() => {
        signal.removeEventListener("abort", abort);
        resolve();
      }, 1000);
      signal.addEventListener("abort", abort, { once: true });
      if (signal.aborted) abort();
    });
  }
}
