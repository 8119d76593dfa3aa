/** Reads server-sent events from a response body. */

/**
 * @param {ReadableStream<Uint8Array>} body
 * @yields {string} the data of each event, until `[DONE]` or the end
 * @returns {AsyncGenerator<string>}
 */
export async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let unread = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      unread += value;
      const events = unread.split("\n\n");
      unread = events.pop() ?? "";
      for (const event of events) {
        const data = event.replace(/^data: ?/, "");
        if (data === "[DONE]") return;
        yield data;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}
