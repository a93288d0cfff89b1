// The server's API.

/** No success. `status` is 0 where no answer came, `retryAfterSeconds` null where the server named no time. */
export class ApiError extends Error {
  constructor(message, status = 0, retryAfterSeconds = null) {
    super(message);
    this.status = status;
    this.retryAfterSeconds = retryAfterSeconds;
  }
}

export class Api {
  /** @param {() => string} getKey gives the API key, "" for none. */
  constructor(getKey) {
    this.getKey = getKey;
  }

  /** The served models: [{id, max_model_len, default_parameters}]. */
  async listModels() {
    const response = await this.#fetch("v1/models");
    return (await response.json()).data;
  }

  /** The chunks of a streamed chat completion; ends with the stream, raises ApiError, or AbortError after the signal. */
  async *streamChat(body, signal) {
    const response = await this.#fetch("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal });
    for await (const data of eventData(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, response.status);
      yield chunk;
    }
    throw new ApiError("The connection broke before the answer was complete.");
  }

  async #fetch(path, options = {}) {
    const headers = { "Content-Type": "application/json" };
    const key = this.getKey();
    if (key) headers.Authorization = `Bearer ${key}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The server cannot be reached. Is it running?");
    }
    if (!response.ok) throw await asError(response);
    return response;
  }
}

async function asError(response) {
  let message = `The server answered with status ${response.status}.`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not the API's own error: a proxy's page, say
  }
  const retryAfter = Number.parseFloat(response.headers.get("Retry-After"));
  return new ApiError(message, response.status, Number.isFinite(retryAfter) ? retryAfter : null);
}

/** The data of server-sent events, however the bytes are cut. */
async function* eventData(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        throw new ApiError("The connection broke before the answer was complete.");
      }
      if (part.done) return;
      const lines = (rest + part.value).split("\n");
      rest = lines.pop();
      // Every event of the API is one line of data.
      for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
