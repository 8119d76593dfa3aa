/** Connects the parts of the page. */

import { AcceptanceView } from "./acceptance_view.js";
import { Client } from "./client.js";
import { Conversation } from "./conversation.js";
import { part } from "./element.js";
import { KeyStore } from "./key_store.js";
import { ModelPicker } from "./model_picker.js";
import { Parameters } from "./parameters.js";
import { ServerStatus } from "./server_status.js";
import { Theme } from "./theme.js";

const client = new Client(new KeyStore());
const parameters = new Parameters();
const acceptance = new AcceptanceView(client, part("acceptance"), part("acceptance-of"));
const picker = new ModelPicker((model, isOnly) => {
  conversation.serve(model, isOnly);
  parameters.offer(model.algorithms);
  server.showUp(model, isOnly);
  acceptance.show(model.id);
});
const server = new ServerStatus(client, (models) => picker.offer(models));
const conversation = new Conversation(
  client,
  parameters,
  (error) => {
    if (error.status === 401) server.askForKey();
  },
  () => server.ask(), // an answer can change the server's state of speculation
);
new Theme(part("theme"));

const prompt = part("prompt");

function send() {
  const question = prompt.value.trim();
  if (question === "" || conversation.isRunning) return;
  prompt.value = "";
  conversation.ask(question);
}

part("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
part("composer").noValidate = true; // the server's errors name field, value and limit
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") conversation.stop();
});
part("stop").addEventListener("click", () => conversation.stop());
part("new-chat").addEventListener("click", () => {
  conversation.clear();
  prompt.focus();
});
for (const button of document.querySelectorAll(".panes button")) {
  button.addEventListener("click", () => {
    document.body.dataset.pane = button.dataset.pane;
    for (const pane of document.querySelectorAll(".panes button")) {
      pane.setAttribute("aria-pressed", String(pane === button));
    }
  });
}

// On a phone focus would open the keyboard over the page.
if (matchMedia("(pointer: fine)").matches) prompt.focus();
server.run();
