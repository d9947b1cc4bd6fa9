// How does an operator act? Each action says what it does, asks once more, and needs the admin token.
import { hasToken, message, post, remove, setToken } from "./api.js";
import { button, byId, el } from "./dom.js";
import { rankName } from "./state.js";
function dialog(title, ...body) {
    const made = byId("dialog", HTMLDialogElement);
    made.replaceChildren(el("h2", { id: "dialog-title" }, title));
    for (const child of body)
        if (child)
            made.append(child);
    if (!made.open)
        made.showModal();
    return made;
}
export function closeDialog() {
    byId("dialog", HTMLDialogElement).close();
}
/** A dialog that acts when it is confirmed, and says what went wrong. */
function confirm(title, body, label, act, danger = false) {
    const said = el("p", { class: "bad", role: "alert" });
    const go = button(label, () => void run(), danger ? "danger" : "main");
    const run = async () => {
        go.disabled = true;
        try {
            const done = await act();
            dialog(title, el("p", { role: "status" }, done), el("div", { class: "buttons" }, button("Close", closeDialog, "main")));
        }
        catch (error) {
            said.textContent = message(error);
            go.disabled = false;
        }
    };
    const back = button("Cancel", closeDialog, "quiet");
    dialog(title, ...body, said, el("div", { class: "buttons" }, back, go));
    // Enter alone must not act, nor tick what cuts requests off.
    back.focus();
}
/** Asks for the token; `given` is told when it is there. */
export function askToken(about, given) {
    const input = el("input", { type: "password", id: "token", autocomplete: "current-password", required: true });
    const form = el("form", { method: "dialog" });
    form.append(el("p", {}, about), el("label", { for: "token" }, "Admin token"), input, el("p", { class: "soft" }, "It stays in this tab’s memory and is gone when the tab is closed or reloaded."), el("div", { class: "buttons" }, el("button", { type: "submit", class: "main" }, "Unlock")));
    form.addEventListener("submit", (event) => {
        event.preventDefault();
        setToken(input.value.trim());
        closeDialog();
        given();
    });
    dialog("The admin token is needed", form);
    input.focus();
}
function guarded(act) {
    if (hasToken())
        act();
    else
        askToken("Acting on the fleet needs the admin token.", act);
}
export function removeWorker(row) {
    guarded(() => {
        const name = rankName({ ...row, ranks: 1 });
        const force = el("input", { type: "checkbox", id: "force" });
        const body = [
            el("p", {}, "Worker ", el("strong", {}, name), ` runs ${row.requests} requests. It gets no new ones, ends what it has, and is removed.`),
            el("label", { for: "force" }, force, " remove it at once and cut off what runs there"),
        ];
        confirm("Drain and remove a worker", body, "Remove", async () => {
            await remove(`/workers/${encodeURIComponent(row.worker)}${force.checked ? "?force=true" : ""}`);
            return force.checked ? `${name} is removed.` : `${name} drains and is removed when it has ended what it has.`;
        }, true);
    });
}
export function addWorker() {
    guarded(() => {
        const url = el("input", { type: "url", id: "worker-url", placeholder: "http://10.0.0.7:8000", required: true });
        const body = [el("label", { for: "worker-url" }, "Address of the engine"), url, el("p", { class: "soft" }, "Kvasir asks it for its model, block size, cache size and event sockets.")];
        confirm("Add a worker", body, "Add", async () => {
            await post("/workers", { url: url.value.trim() });
            return `${url.value.trim()} is added; it serves as soon as it answers.`;
        });
        url.focus();
    });
}
export function setThresholds(model, now) {
    guarded(() => {
        const fields = [
            ["active_decode_blocks_threshold", "Share of KV blocks in use, 0 to 1", "0.01"],
            ["active_prefill_tokens_threshold", "Prompt tokens waiting", "1"],
            ["active_prefill_tokens_threshold_frac", "Batches of prompt tokens waiting", "0.1"],
        ];
        const inputs = fields.map(([name, label, step]) => {
            const input = el("input", { type: "number", id: name, min: 0, step, value: now[name] ?? "" });
            return [name, label, input];
        });
        const body = [
            el("p", {}, "Workers of ", el("strong", {}, model), " above any of these get no new requests. A field that stays empty is not changed."),
            ...inputs.flatMap(([name, label, input]) => [el("label", { for: name }, label), input]),
        ];
        confirm("Busy thresholds", body, "Set", async () => {
            const update = { model };
            for (const [name, , input] of inputs)
                if (input.value !== "")
                    update[name] = Number(input.value);
            await post("/busy_threshold", update);
            return `The thresholds of ${model} are set.`;
        });
    });
}
