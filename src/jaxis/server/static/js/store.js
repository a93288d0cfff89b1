// The conversations, in this browser's IndexedDB. All of them are in memory too.
//
// A conversation is {id, title, isNamed, createdAt, updatedAt (milliseconds), systemPrompt, messages}. A message is an API
// message with an id, and for the assistant's {model, finish_reason, stats, reasoning_content, reasoning_seconds, error}.
// The content is a string; a user's message may have images before it, a list of data: URLs.

import { newId } from "./dom.js";

const DATABASE = "jaxis-chat";
const TABLE = "conversations";
const FORMAT = "jaxis-conversations";
const IMAGE_URL = /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/]+=*$/;
const ROLES = new Set(["user", "assistant", "tool"]);

export class Store extends EventTarget {
  constructor() {
    super();
    this.conversations = new Map();
    this.database = null; // stays null where the browser gives no storage: conversations last as long as the page
    this.inUse = new Set(); // ids of those that this page is changing: what other tabs store does not replace them
    this.channel = new BroadcastChannel(DATABASE);
    this.channel.onmessage = ({ data }) => this.#reload(data);
  }

  /** Loads what is stored; false if the browser gives no storage. */
  async open() {
    try {
      const request = indexedDB.open(DATABASE, 1);
      request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
      this.database = await settled(request);
      for (const conversation of await settled(this.#table("readonly").getAll())) {
        this.conversations.set(conversation.id, conversation);
      }
      return true;
    } catch {
      this.database = null;
      return false;
    }
  }

  /** Newest first. */
  list() {
    return [...this.conversations.values()].sort((a, b) => b.updatedAt - a.updatedAt);
  }

  get(id) {
    return this.conversations.get(id);
  }

  /** Stores a conversation as it is now. */
  async put(conversation) {
    this.conversations.set(conversation.id, conversation);
    await this.#write((table) => table.put(conversation), conversation.id);
  }

  async delete(id) {
    this.conversations.delete(id);
    await this.#write((table) => table.delete(id), id);
  }

  async #write(change, id) {
    if (this.database === null) return;
    try {
      const table = this.#table("readwrite");
      const request = change(table);
      table.transaction.commit(); // at once: a page that is being left gets no chance to do it later
      await settled(request);
      this.channel.postMessage(id);
    } catch (error) {
      this.dispatchEvent(new CustomEvent("failed", { detail: error }));
    }
  }

  /** Another tab changed a conversation. */
  async #reload(id) {
    if (this.database === null || this.inUse.has(id)) return;
    const stored = await settled(this.#table("readonly").get(id));
    if (stored) this.conversations.set(id, stored);
    else this.conversations.delete(id);
    this.dispatchEvent(new CustomEvent("changed", { detail: id }));
  }

  #table(mode) {
    return this.database.transaction(TABLE, mode).objectStore(TABLE);
  }
}

function settled(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("blocked"));
  });
}

export function newConversation(systemPrompt) {
  const now = Date.now();
  return {
    id: newId(),
    title: "New conversation",
    isNamed: false,
    createdAt: now,
    updatedAt: now,
    systemPrompt,
    messages: [],
  };
}

/** A message's content as the API takes it: parts if there are images. */
export function apiContent({ content, images }) {
  if (!images?.length) return content;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content ? [...parts, { type: "text", text: content }] : parts;
}

/** What goes into a file: the system prompt is the first message, so that the messages are the API's. */
export function exportedConversations(conversations) {
  const exported = conversations.map(({ id, systemPrompt, messages, ...rest }) => ({
    ...rest,
    messages: [
      ...(systemPrompt ? [{ role: "system", content: systemPrompt }] : []),
      ...messages.map(({ id, images, ...message }) => ({ ...message, content: apiContent({ ...message, images }) })),
    ],
  }));
  return { format: FORMAT, version: 1, conversations: exported };
}

/** The conversations of a file, as new ones. Raises an Error that says what is wrong with it. */
export function importedConversations(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new Error("The file is not JSON.");
  }
  const rows = Array.isArray(value) ? value : (value?.conversations ?? [value]);
  if (!Array.isArray(rows) || rows.length === 0) throw new Error("The file holds no conversation.");
  return rows.map(importedConversation);
}

function importedConversation(row, index) {
  const where = `Conversation ${index + 1}`;
  if (!Array.isArray(row?.messages)) throw new Error(`${where} has no list of messages.`);
  const conversation = newConversation("");
  const messages = [...row.messages];
  if (messages[0]?.role === "system") conversation.systemPrompt = checkedText(messages.shift().content, where);
  conversation.messages = messages.map((message) => importedMessage(message, where));
  conversation.title = typeof row.title === "string" && row.title ? row.title.slice(0, 200) : titleOf(conversation);
  conversation.isNamed = true;
  conversation.updatedAt -= index; // in the list they stand as in the file
  for (const name of ["createdAt", "updatedAt"]) if (Number.isFinite(row[name])) conversation[name] = row[name];
  return conversation;
}

function importedMessage(message, where) {
  if (!ROLES.has(message?.role))
    throw new Error(`${where} has a message with the role ${JSON.stringify(message?.role)}.`);
  const { content = "" } = message;
  const parts = message.role === "user" && Array.isArray(content) ? content : [];
  const urls = parts.filter(({ type }) => type === "image_url").map((part) => part.image_url?.url);
  if (!urls.every((url) => IMAGE_URL.test(url))) throw new Error(`${where} has an image that is no data: URL.`);
  const texts = parts.filter(({ type }) => type === "text").map(({ text }) => checkedText(text, where));
  const imported = {
    id: newId(),
    role: message.role,
    content: parts.length ? texts.join("\n") : checkedText(content ?? "", where),
    ...(urls.length ? { images: urls } : {}),
  };
  for (const name of ["reasoning_content", "model", "finish_reason", "tool_call_id"]) {
    if (typeof message[name] === "string") imported[name] = message[name];
  }
  if (message.stats && typeof message.stats === "object") {
    imported.stats = Object.fromEntries(Object.entries(message.stats).filter(([, value]) => Number.isFinite(value)));
  }
  if (Array.isArray(message.tool_calls)) {
    imported.tool_calls = message.tool_calls.map((call) => ({
      id: String(call?.id ?? ""),
      type: "function",
      function: { name: String(call?.function?.name ?? ""), arguments: String(call?.function?.arguments ?? "") },
    }));
  }
  return imported;
}

function checkedText(content, where) {
  if (typeof content !== "string") throw new Error(`${where} has a message whose content is no text.`);
  return content;
}

/** The beginning of the first message. */
export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user")?.content ?? "";
  const line = first.trim().split("\n")[0];
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "New conversation";
}
