/** The page's calls to the gateway. */

import { readEvents } from "./event_reader.js";

/**
 * @typedef {{id: string, algorithms: string[], detail: string}} Model with the algorithms of its
 *   attached drafts; `detail` says why no trees are verified, and is empty while they are
 */

/** The gateway refused a request, or did not answer. */
export class ApiError extends Error {
  /**
   * @param {string} message
   * @param {number} status 0 when there was no answer
   * @param {string} code
   */
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export class Client {
  /** @param {import("./key_store.js").KeyStore} keys */
  constructor(keys) {
    this.keys = keys;
  }

  /** @returns {Promise<Model[]>} the served models, at least one */
  async served() {
    const models = await (await this.#ask("v1/models")).json();
    if (models.data.length === 0) throw new ApiError("no model is served yet", 503, "no_model");
    const info = await (await this.#ask("server_info")).json();
    return models.data.map(({ id }) => {
      const serving = info.targets.filter((target) => target.model === id);
      const detail = serving.map((target) => target.speculation_detail ?? "").find((text) => text !== "");
      return { id, algorithms: algorithmsOf(serving), detail: detail ?? "" };
    });
  }

  /**
   * @param {string} model
   * @returns {Promise<import("./acceptance.js").History>}
   */
  async history(model) {
    return (await this.#ask(`speculation_history?model=${encodeURIComponent(model)}`)).json();
  }

  /**
   * @param {object} body of `/v1/chat/completions`; the answer is always streamed
   * @param {AbortSignal} signal closes the connection, which ends the request on the target
   * @returns {AsyncGenerator<object>} chunks
   */
  async *chat(body, signal) {
    const response = await this.#ask("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
      signal,
    });
    for await (const data of readEvents(response.body)) {
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ApiError(chunk.error.message, response.status, chunk.error.code);
      yield chunk;
    }
  }

  /**
   * @param {string} path relative, so that the page also works below a prefix
   * @param {RequestInit} [options]
   * @returns {Promise<Response>}
   */
  async #ask(path, options = {}) {
    const key = this.keys.get();
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw new ApiError("the gateway does not answer", 0, "unreachable");
    }
    if (!response.ok) throw await refusal(response);
    return response;
  }
}

/**
 * @param {{draft_algorithms: string[] | null}[]} serving targets of one model
 * @returns {string[]} of all their drafts
 */
function algorithmsOf(serving) {
  return [...new Set(serving.flatMap((target) => target.draft_algorithms ?? []))].sort();
}

/**
 * @param {Response} response
 * @returns {Promise<ApiError>}
 */
async function refusal(response) {
  const body = await response.json().catch(() => ({}));
  const error = body.error ?? {};
  const message = error.message ?? `the gateway answers ${response.status}`;
  return new ApiError(message, response.status, error.code ?? "");
}
