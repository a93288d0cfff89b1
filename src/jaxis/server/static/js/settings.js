// What requests are sent with: parameters, system prompt, API key.

import { byId, h } from "./dom.js";

const STORED = "jaxis-settings";
const STORED_KEY = "jaxis-api-key";
// Fields of a request that the page sets itself.
const OWN_FIELDS = [
  "messages",
  "model",
  "n",
  "stream",
  "stream_options",
  "continue_final_message",
  "add_generation_prompt",
];

const PARAMETERS = [
  { name: "temperature", label: "Temperature", min: 0, help: "0 always takes the most likely token" },
  { name: "top_p", label: "Top p", min: 0, max: 1, help: "keep the likeliest tokens that reach this probability" },
  { name: "top_k", label: "Top k", min: -1, integer: true, help: "keep this many tokens; 0 keeps all" },
  { name: "min_p", label: "Min p", min: 0, max: 1, help: "drop tokens below this share of the likeliest one" },
  { name: "max_tokens", label: "Max tokens", min: 1, integer: true, placeholder: "no limit", help: "of an answer" },
  { name: "seed", label: "Seed", integer: true, placeholder: "random", help: "makes an answer repeatable" },
  {
    name: "frequency_penalty",
    label: "Frequency penalty",
    min: -2,
    max: 2,
    help: "for each time a token was generated",
  },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, help: "for tokens generated at all" },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0, help: "1 does nothing" },
];

// For conversations with a model that brings no sampling settings: without filters, a small one soon leaves the subject.
const UNFILTERED = { temperature: 1, top_p: 1, top_k: 0, min_p: 0 };
const CHAT_DEFAULTS = { temperature: 0.8, top_p: 0.95, top_k: 40 };

/** The settings as stored in this browser, and the dialog that changes them. */
export class Settings extends EventTarget {
  constructor() {
    super();
    this.values = { parameters: {}, stop: "", extra: "", systemPrompt: "", ...read(localStorage, STORED) };
    this.chatDefaults = {};
    this.dialog = byId("settings");
    this.form = byId("settings-form");
    this.inputs = new Map(PARAMETERS.map((parameter) => [parameter.name, numberInput(parameter)]));
    byId("parameters").append(
      ...PARAMETERS.map((parameter) => parameterRow(parameter, this.inputs.get(parameter.name))),
    );
    this.form.addEventListener("submit", (event) => this.#save(event));
    byId("cancel-settings").addEventListener("click", () => this.dialog.close());
    byId("reset-settings").addEventListener("click", () => this.#fill({ parameters: {}, stop: "", extra: "" }));
  }

  get systemPrompt() {
    return this.values.systemPrompt;
  }

  get apiKey() {
    return read(sessionStorage, STORED_KEY) ?? read(localStorage, STORED_KEY) ?? "";
  }

  /** The fields of a request that were set. */
  requestFields() {
    const { parameters, stop, extra } = this.values;
    const stops = stopTexts(stop);
    return { ...this.chatDefaults, ...parameters, ...(stops.length ? { stop: stops } : {}), ...(extra.trim() ? JSON.parse(extra) : {}) };
  }

  /** Shows as placeholders what fields that are left out are: the model's settings, or else what suits a chat. */
  showDefaults(defaults) {
    const bringsNone = Object.entries(UNFILTERED).every(([name, value]) => defaults?.[name] === value);
    this.chatDefaults = bringsNone ? CHAT_DEFAULTS : {};
    byId("chat-defaults").hidden = !bringsNone;
    for (const [name, value] of Object.entries({ ...defaults, ...this.chatDefaults })) {
      if (this.inputs.has(name)) this.inputs.get(name).placeholder = String(Math.round(value * 1e6) / 1e6);
    }
  }

  /** Opens the dialog; with a reason to ask for the key, at the key. */
  open(systemPrompt, keyReason = "") {
    this.#fill({ ...this.values, systemPrompt });
    byId("api-key").value = this.apiKey;
    byId("remember-key").checked = read(localStorage, STORED_KEY) !== null;
    this.#showError(keyReason);
    if (!this.dialog.open) this.dialog.showModal();
    if (keyReason) byId("api-key").focus();
  }

  #fill({ parameters, stop, extra, systemPrompt }) {
    for (const [name, input] of this.inputs) input.value = parameters[name] ?? "";
    byId("stop").value = stop;
    byId("extra").value = extra;
    if (systemPrompt !== undefined) byId("system-prompt").value = systemPrompt;
  }

  #save(event) {
    event.preventDefault();
    const fault = this.#fault();
    this.#showError(fault?.text ?? "");
    if (fault) {
      fault.input.focus();
      return;
    }
    const given = [...this.inputs].filter(([, input]) => input.value !== "");
    this.values = {
      parameters: Object.fromEntries(given.map(([name, input]) => [name, input.valueAsNumber])),
      stop: byId("stop").value,
      extra: byId("extra").value,
      systemPrompt: byId("system-prompt").value.trim(),
    };
    write(localStorage, STORED, this.values);
    const key = byId("api-key").value.trim();
    write(sessionStorage, STORED_KEY, key || null);
    write(localStorage, STORED_KEY, byId("remember-key").checked && key ? key : null);
    this.dialog.close();
    this.dispatchEvent(new Event("saved"));
  }

  /** The first field that cannot be sent. */
  #fault() {
    for (const { name, label, min, max, integer } of PARAMETERS) {
      const input = this.inputs.get(name);
      // Not `step`: it counts from the minimum, and far from zero it is not exact.
      if (input.validity.valid && (!integer || input.value === "" || Number.isSafeInteger(input.valueAsNumber)))
        continue;
      const kind = integer ? "a whole number" : "a number";
      const limits = [min === undefined ? "" : ` from ${min}`, max === undefined ? "" : ` to ${max}`].join("");
      return { input, text: `${label} must be ${kind}${limits}.` };
    }
    const extra = byId("extra");
    const text = extra.value.trim() ? extraFault(extra.value) : "";
    return text ? { input: extra, text } : null;
  }

  #showError(text) {
    const error = byId("settings-error");
    error.textContent = text;
    error.hidden = !text;
  }
}

function numberInput({ name, min, max, placeholder }) {
  const about = { id: `parameter-${name}`, placeholder: placeholder ?? "default", "aria-describedby": `help-${name}` };
  return h("input", { type: "number", step: "any", min, max, ...about });
}

function parameterRow({ name, label, help }, input) {
  return h(
    "div",
    { class: "parameter" },
    h("label", { for: input.id }, label),
    input,
    h("span", { class: "hint", id: `help-${name}` }, help),
  );
}

function stopTexts(text) {
  return text
    .split("\n")
    .filter(Boolean)
    .map((line) => line.replaceAll("\\n", "\n"));
}

function extraFault(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return `More request fields: this is not JSON: ${error.message}.`;
  }
  if (value === null || typeof value !== "object" || Array.isArray(value))
    return 'More request fields: write an object, {"name": value}.';
  const own = OWN_FIELDS.find((name) => name in value);
  return own ? `More request fields: the page sets ${own} itself: leave it out.` : "";
}

function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    return null; // no storage, or not ours
  }
}

function write(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, JSON.stringify(value));
  } catch {
    // no storage: the values last as long as the page
  }
}
