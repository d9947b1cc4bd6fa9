// How is the server asked? With the operator's token, which lives in this tab's memory and nowhere else.
let token = null;
export class ApiFault extends Error {
    status;
    constructor(status, message) {
        super(message);
        this.status = status;
    }
}
export function setToken(given) {
    token = given;
}
export function hasToken() {
    return token !== null;
}
export function authorization() {
    return token === null ? {} : { authorization: `Bearer ${token}` };
}
/** The message of an answer that says no. */
export async function fault(answer) {
    let message = `${answer.status} ${answer.statusText}`;
    try {
        const body = await answer.json();
        if (typeof body === "object" && body !== null && "message" in body)
            message = String(body.message);
    }
    catch {
        // The status says enough.
    }
    return new ApiFault(answer.status, message);
}
async function ask(method, path, body) {
    const headers = { ...authorization(), accept: "application/json" };
    if (body !== undefined)
        headers["content-type"] = "application/json";
    const init = { method, headers, cache: "no-store" };
    if (body !== undefined)
        init.body = JSON.stringify(body);
    const answer = await fetch(path, init);
    if (!answer.ok)
        throw await fault(answer);
    return answer.json();
}
export async function get(path) {
    return (await ask("GET", path));
}
export async function post(path, body) {
    return (await ask("POST", path, body));
}
export async function remove(path) {
    return (await ask("DELETE", path));
}
export function message(error) {
    return error instanceof Error ? error.message : String(error);
}
